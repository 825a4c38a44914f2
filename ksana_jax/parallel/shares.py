"""What one of several devices has of a model: sizes, and the rows and columns of each matrix. Knows no arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from ksana_jax.config import ConfigError, ModelConfig
from ksana_jax.kv.layout import KVLayout
from ksana_jax.sampling.sampler import GROUP

# Fields of Params and LayerParams that are divided among devices, by the axis that is: rows of matrices whose result is
# divided, columns of those whose argument is. All others are whole on every device.
ROWS = ("embed", "head", "w_q", "w_k", "w_v", "w_gate", "w_up", "b_q", "b_k", "b_v", "b_gate", "b_up", "sink_logits")
ROWS += ("w_qkv", "w_gate_up", "b_qkv", "b_gate_up")  # of `models.joined`
COLUMNS = ("w_o", "w_down")
# Fields with rows of the vocabulary, and with those of kv heads.
VOCABULARY, KV = ("embed", "head"), ("w_k", "w_v", "b_k", "b_v")


def check_divisible(config: ModelConfig, num_devices: int) -> None:
    """Checks that a model can be divided.

    Raises:
      ConfigError: query heads, kv heads or hidden units of MLPs do not divide; the message has all of them.
    """
    n, problems = num_devices, []
    for name in ("num_heads", "d_ff"):
        if (size := getattr(config, name)) % n:
            problems.append(f"{name} {size} is not a multiple of it")
    if config.num_kv_heads % n and n % config.num_kv_heads:
        problems.append(f"num_kv_heads {config.num_kv_heads} is neither a multiple of it nor a divisor")
    if problems:
        raise ConfigError(f"tensor_parallel_size is {n}: {'; '.join(problems)}")


def local_vocabulary(vocab_size: int, num_devices: int) -> int:
    """Returns how many ids each device has, the last ones perhaps beyond the vocabulary.

    They are whole groups of those by which a token is drawn, so that the draw is that of one device.
    """
    if num_devices == 1:
        return vocab_size
    return -(-vocab_size // (GROUP * num_devices)) * GROUP


def local_model(config: ModelConfig, num_devices: int) -> ModelConfig:
    """Returns the model that each device computes: its heads, hidden units of MLPs, and ids of the vocabulary.

    Raises:
      ConfigError: see `check_divisible`.
    """
    if num_devices == 1:
        return config
    check_divisible(config, num_devices)
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // num_devices,
        num_kv_heads=max(config.num_kv_heads // num_devices, 1),
        d_ff=config.d_ff // num_devices,
        vocab_size=local_vocabulary(config.vocab_size, num_devices),
        attention_scale=config.layers[0].attention.scale,
    )


def pool_layout(layout: KVLayout, num_devices: int) -> KVLayout:
    """Returns the layout of the pools of all devices together. Each has a kv head, which several may share."""
    return layout.with_heads(max(layout.num_kv_heads, num_devices))


def local_layout(layout: KVLayout, num_devices: int) -> KVLayout:
    """Returns the layout of one device's pool."""
    return pool_layout(layout, num_devices).local(num_devices)


class Share(NamedTuple):
    """One device's part of a weight: these of its rows and columns, and rows of zeros after them."""

    rows: slice
    columns: slice = slice(None)
    padding: int = 0


WHOLE_WEIGHT = Share(slice(None))


def share(field: str, shape: Sequence[int], device: int, num_devices: int, num_kv_heads: int) -> Share:
    """Returns the part of a weight [out, in] or [out] that a device has.

    Args:
      field: of Params or LayerParams. shape: of the whole weight.
      device: index in [0, num_devices).
      num_kv_heads: K of the model.
    """
    if field in COLUMNS:
        width = shape[1] // num_devices
        return Share(slice(None), slice(device * width, (device + 1) * width))
    if field not in ROWS:
        return WHOLE_WEIGHT
    if field in VOCABULARY:
        size = local_vocabulary(shape[0], num_devices)
        start, end = (min(at * size, shape[0]) for at in (device, device + 1))
        return Share(slice(start, end), padding=size - (end - start))
    if field in KV and num_kv_heads < num_devices:
        of_head = shape[0] // num_kv_heads
        head = device * num_kv_heads // num_devices
        return Share(slice(head * of_head, (head + 1) * of_head))
    size = shape[0] // num_devices
    return Share(slice(device * size, (device + 1) * size))
