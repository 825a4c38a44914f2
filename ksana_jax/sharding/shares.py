"""One device's part of a divided model: sizes, and the rows and columns of each matrix. Knows no arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.kv.layout import KVLayout
from ksana_jax.models.layers import norm_kind
from ksana_jax.models.mlp import unstated
from ksana_jax.models.params import heads_of, param_shapes, stated, weights_of
from ksana_jax.models.weight import Division, Weight
from ksana_jax.sampling.sampler import GROUP

SETTING = "tensor_parallel_size"


def check_divisible(config: ModelConfig, num_devices: int) -> None:
    """Checks that a model can be divided.

    Raises:
      ConfigError: query heads, kv heads, hidden units of MLPs, or heads or channels of recurrent layers do not divide,
        or a kind of MLP does not state that it does; the message has all of them.
    """
    n, problems = num_devices, []
    sizes = {"num_heads": config.num_heads, "d_ff": config.d_ff}
    if config.experts is not None:
        sizes |= {"shared_d_ff": config.experts.shared_d_ff, "plain_d_ff": config.experts.plain_d_ff}
    problems += [f"{name} {size} is not a multiple of it" for name, size in sizes.items() if size % n]
    if config.num_kv_heads % n and n % config.num_kv_heads:
        problems.append(f"num_kv_heads {config.num_kv_heads} is neither a multiple of it nor a divisor")
    if config.qk_norm == "projection" and norm_kind(config.norm).plus_one is None:
        problems.append(f"qk_norm 'projection' divides root mean square norms, not {config.norm!r}")
    if config.recurrent is not None:
        problems += config.recurrent.undivided(config.d_model, n)
    if reason := unstated(config, "divides"):
        problems.append(reason)
    if problems:
        raise ConfigError(f"{SETTING} is {n}: {'; '.join(problems)}")


def local_vocabulary(vocab_size: int, num_devices: int) -> int:
    """Returns how many ids each device has, the last ones perhaps beyond the vocabulary.

    They are whole groups of the sampler's, so that the draw equals one device's.
    """
    if num_devices == 1:
        return vocab_size
    return -(-vocab_size // (GROUP * num_devices)) * GROUP


def local_model(config: ModelConfig, num_devices: int) -> ModelConfig:
    """Returns the model that each device computes: its heads, hidden units of MLPs, and ids of the vocabulary.

    Raises:
      ConfigError: see `check_divisible`; or a weight does not state how it is divided, or its parts do not have
        the shapes that a device computes with.
    """
    if num_devices == 1:
        return config
    check_divisible(config, num_devices)
    experts = config.experts
    if experts is not None:
        widths = {"shared_d_ff": experts.shared_d_ff // num_devices, "plain_d_ff": experts.plain_d_ff // num_devices}
        experts = dataclasses.replace(experts, **widths)
    recurrent = config.recurrent and config.recurrent.divided(config.d_model, num_devices)
    local = dataclasses.replace(
        config,
        experts=experts,
        recurrent=recurrent,
        num_heads=config.num_heads // num_devices,
        num_kv_heads=max(config.num_kv_heads // num_devices, 1),
        d_ff=config.d_ff // num_devices,
        vocab_size=local_vocabulary(config.vocab_size, num_devices),
        attention_scale=config.layers[0].attention.scale,
    )
    if problems := list(_wrong_parts(config, local, num_devices)):
        raise ConfigError(f"{SETTING} is {num_devices}: {'; '.join(problems)}")
    return local


def _wrong_parts(config: ModelConfig, local: ModelConfig, num_devices: int) -> Iterator[str]:
    """Compares the shapes of a device's parts of weights with the weights of the model that it computes."""
    whole, parts = param_shapes(config), param_shapes(local)
    of_layers = zip(whole.layers, parts.layers, config.layers, strict=True)
    for weights, of_device, spec in dict.fromkeys(((whole, parts, None), *of_layers)):
        wanted = weights_of(of_device)
        for field, shape in weights_of(weights).items():
            mine = share(field, shape, 0, num_devices, heads_of(field, spec))
            found = mine.shape(shape)
            if found != wanted[field]:
                yield f"a part of {field} {list(shape)} is {list(found)}, a device needs {list(wanted[field])}"


def pool_layout(layout: KVLayout, num_devices: int) -> KVLayout:
    """Returns the layout of the pools of all devices together. Each has a kv head, which several may share."""
    found = layout.with_heads(max(layout.num_kv_heads, num_devices))
    return dataclasses.replace(found, states=layout.states and layout.states.of_devices(num_devices))


def local_layout(layout: KVLayout, num_devices: int) -> KVLayout:
    """Returns the layout of one device's pool."""
    found = pool_layout(layout, num_devices).local(num_devices)
    return dataclasses.replace(found, states=layout.states and layout.states.of_devices(num_devices, each=True))


class Share(NamedTuple):
    """One device's part of a weight: these of its rows and columns, and rows of zeros after them.

    stacked: True if it has such a part of each weight of a stack.
    """

    rows: slice
    columns: slice = slice(None)
    padding: int = 0
    stacked: bool = False

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the part of a weight, from the whole weight's."""
        stack, of_one = tuple(whole[: self.stacked]), whole[self.stacked :]
        rows, columns = (len(range(size)[part]) for size, part in zip((*of_one, 1, 1)[:2], self[:2], strict=True))
        return *stack, *(rows + self.padding, columns, *of_one[2:])[: len(of_one)]


WHOLE_WEIGHT = Share(slice(None))


def division(field: str) -> Division:
    """Returns how devices divide the weight of a field of Params or LayerParams.

    Raises:
      ConfigError: the field states nothing.
    """
    return stated(field, SETTING).divides


def share(field: str, shape: Sequence[int], device: int, num_devices: int, num_heads: int) -> Share:
    """Returns the part of a weight [out, in] or [out] that a device has.

    Args:
      field: of Params or LayerParams. shape: of the whole weight, or stack of weights.
      device: index in [0, num_devices).
      num_heads: see `heads_of`.

    Raises:
      ConfigError: the field states nothing.
    """
    weight = stated(field, SETTING)
    if weight.divides in ("whole", "once"):
        return WHOLE_WEIGHT
    if weight.stacked:
        return _share(weight, shape[1:], device, num_devices, num_heads)._replace(stacked=True)
    return _share(weight, shape, device, num_devices, num_heads)


def _share(weight: Weight, shape: Sequence[int], device: int, num_devices: int, num_heads: int) -> Share:
    if weight.divides == "columns":
        width = shape[1] // num_devices
        return Share(slice(None), slice(device * width, (device + 1) * width))
    if weight.divides == "vocabulary":
        size = local_vocabulary(shape[0], num_devices)
        start, end = (min(at * size, shape[0]) for at in (device, device + 1))
        return Share(slice(start, end), padding=size - (end - start))
    if weight.divides == "heads" and num_heads < num_devices:
        device = device * num_heads // num_devices
    size = weight.local_rows(shape[0], num_devices, num_heads)
    return Share(slice(device * size, (device + 1) * size))
