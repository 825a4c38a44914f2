"""Places an engine's arrays and programs on one device, or divides them among several. Knows no steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.devices.capabilities import features
from ksana_jax.devices.features import Features
from ksana_jax.kv.layout import KVLayout
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import Params
from ksana_jax.ops.new_pool import make_cache, zeros_on
from ksana_jax.ops.pool import KVCache
from ksana_jax.sampling.vocabulary import Vocabulary
from ksana_jax.sharding.shares import WHOLE_WEIGHT, Share
from ksana_jax.sharding.specs import EVERYWHERE


class Placement:
    """One device, jax's first one unless another is given; programs are compiled for it directly."""

    num_devices = 1

    def __init__(self, device: Any = None):
        self._device = device

    @property
    def device(self) -> Any:
        """The first device of this process."""
        return self._device or jax.local_devices()[0]

    @property
    def num_local(self) -> int:
        """Number of this process's devices; other processes have the rest."""
        return self.num_devices

    def connect(self) -> None:
        """Connects the devices with other processes' devices, if any."""

    @property
    def features(self) -> Features:
        """Features that programs may use on the devices."""
        return features(self.device)

    def local_model(self, config: ModelConfig) -> ModelConfig:
        """Returns the model that one device computes."""
        return config

    def pool_layout(self, layout: KVLayout) -> KVLayout:
        """Returns the layout of the pool of all devices, which repeats kv heads where there are fewer than devices."""
        return layout

    def local_layout(self, layout: KVLayout) -> KVLayout:
        """Returns the layout of one device's pool."""
        return layout

    def host_layout(self, layout: KVLayout) -> KVLayout:
        """Returns the layout of blocks in this host's memory, which have each kv head of its devices once."""
        return layout

    def operators(self, operators: Operators) -> Operators:
        """Returns operators that a program of the devices computes with."""
        return operators

    def vocabulary(self, config: ModelConfig) -> Vocabulary:
        """Returns the vocabulary for sampling in a program of the devices."""
        return Vocabulary(features=self.features)

    def params(self, config: ModelConfig, params: Params, embedding_device: str = "device") -> Params:
        """Places weights, or shapes of weights, perhaps placed already; "host" leaves the embedding where it is."""
        if self._device is None:
            return params
        return jax.tree.map(lambda x: jax.device_put(x, self._device) if isinstance(x, jax.Array) else x, params)

    def drawn(self, config: ModelConfig, path: Any, weight: Any) -> Any:
        """Places one weight, or its shape; path: of it in Params, from `jax.tree_util`."""
        return weight

    def weight(self, config: ModelConfig, path: Any, shape: tuple[int, ...], read: Callable[[Share], Any]) -> Any:
        """Returns a weight that is read in parts, one for each device, and placed before the next one is read.

        Args:
          path: of the weight in Params, from `jax.tree_util`. shape: of the whole weight.
          read: returns one device's part as a NumPy array, or as a `Matrix` of them.
        """
        return jax.block_until_ready(jax.device_put(read(WHOLE_WEIGHT), self._device))

    def pool(self, layout: KVLayout, num_blocks: int) -> KVCache:
        """Creates an empty pool."""
        return make_cache(self.pool_layout(layout), num_blocks, zeros_on(self.device))

    def everywhere(self, tree: Any) -> Any:
        """Puts arrays on each device."""
        return jax.device_put(tree, self._device)

    def by_head(self, memory_kind: str | None = None) -> jax.sharding.Sharding:
        """Returns the sharding of blocks [n, *leaf.shape] of the pool, in a kind of memory of the devices."""
        return jax.sharding.SingleDeviceSharding(self.device, memory_kind=memory_kind)

    def to_host(self, leaf: jax.Array) -> np.ndarray:
        """Returns blocks [n, *leaf.shape] of the pool, with each kv head of this host's devices once."""
        return np.asarray(leaf)

    def from_host(self, leaf: np.ndarray, memory_kind: str | None = None) -> jax.Array:
        """Places what `to_host` returns, in a kind of memory of the devices."""
        return jax.device_put(leaf, self.by_head(memory_kind))

    def mapped(self, function: Callable, returns: Any = EVERYWHERE) -> Callable:
        """Returns a function of whole arrays that computes one of each device's parts of them on each device.

        Args:
          returns: specs of its results: EVERYWHERE or BY_HEAD, of all or in a tuple of each.
        """
        return function

    def jit(
        self,
        function: Callable,
        *,
        returns: Any = EVERYWHERE,
        donated: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        """Returns a jitted function of whole arrays, see `mapped`.

        Args:
          donated: index of the argument that is donated. options: of the compiler.
        """
        return jax.jit(function, donate_argnums=donated, compiler_options=options)


# The default placement of an engine.
ONE_DEVICE = Placement()
