"""The layout of states of recurrent layers: a pool of slots besides the pool of blocks. No jax.

A slot holds the state of one text in all recurrent layers. It has its own size in bytes: a common one for blocks and
slots would make blocks of hundreds of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.kv.groups import KVGroup
from ksana_jax.kv.leaf import KV_HEADS, Leaf
from ksana_jax.kv.visible_range import VisibleRange

# A token reads the state after the one before it: of all blocks, later tokens need the one where the text ends.
LIVE = VisibleRange(window=2, num_sinks=0, globals_every=())
# Slots for each row without a prefix cache, by default: forks and beams share states with their parents.
SLOTS_PER_ROW = 2


class StateLayout(NamedTuple):
    """Describes the slots: the layers whose states they hold, the arrays, and the number of slots.

    convolved: heads and channels of the convolved numbers, see `ShortConvSpec.convolved`.
    """

    layers: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    num_slots: int
    convolved: tuple[tuple[int, int], ...] = ()

    @property
    def group(self) -> KVGroup:
        """The recurrent layers as a group whose blocks are found in the prefix index."""
        return KVGroup(self.layers, LIVE)

    @property
    def slot_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes

    def places(self, num_devices: int) -> dict[str, np.ndarray]:
        """Returns the heads or channels of each leaf that devices have, one device's after another's. Some are there
        several times if there are fewer heads of keys than devices."""
        found, start = [[] for _ in range(num_devices)], 0
        for heads, size in self.convolved:
            channels = start + np.arange(heads * size).reshape(heads, size)
            for device, own in enumerate(found):
                first = device * heads // num_devices
                own.append(channels[first : first + max(heads // num_devices, 1)].reshape(-1))
            start += heads * size
        others = {leaf.name: np.arange(leaf.shape[KV_HEADS]) for leaf in self.leaves}
        return others | {"conv": np.concatenate([part for own in found for part in own])}

    def of_devices(self, num_devices: int, each: bool = False) -> StateLayout:
        """Returns the layout of the slots of several devices together, or of each."""
        sizes = {name: len(at) // (num_devices if each else 1) for name, at in self.places(num_devices).items()}
        return self._replace(leaves=tuple(leaf.with_heads(sizes[leaf.name]) for leaf in self.leaves))


def state_layout(model: ModelConfig, dtype: str, num_slots: int) -> StateLayout | None:
    """Returns the layout of a model's states; None without recurrent layers. dtype: NumPy's name of the model's."""
    if (spec := model.recurrent) is None:
        return None
    leaves = [
        Leaf(name, (len(spec.layers), *shape), own or dtype) for name, (shape, own) in spec.state(model.d_model).items()
    ]
    return StateLayout(spec.layers, tuple(leaves), num_slots, spec.convolved(model.d_model))
