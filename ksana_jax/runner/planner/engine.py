"""Sizes the engine's pool, and compares planned with measured memory afterwards."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

import jax
import numpy as np

from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.core.units import byte_size
from ksana_jax.devices.capabilities import capabilities
from ksana_jax.devices.platforms import platform_of
from ksana_jax.kv.layout import KVLayout
from ksana_jax.loading.load import array_dtype
from ksana_jax.runner.planner.devices import available_bytes, physical_bytes, this_device
from ksana_jax.runner.planner.process import compiled_bytes, device_peak_bytes
from ksana_jax.runner.planner.step_memory import program_bytes, step_bytes
from ksana_jax.runner.planner.terms import weights_bytes
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.speculative import draft_lengths, read_speculative
from ksana_jax.scheduler.step.ladders import largest_shapes, make_buckets
from ksana_jax.sharding.shares import local_layout, local_model

logger = logging.getLogger("ksana_jax")
_TWICE = " (twice during a step, since the device does not support donation)"


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """Predicted bytes of an engine on its device; with several devices, on each.

    step_bytes: arrays and buffers of the largest step; None unless requested, since it has to be compiled.
    pool_copies: pools that exist during a step: 2 on a device without donation.
    state_bytes: of the pool of states of recurrent layers, which pool_bytes has not.
    """

    num_blocks: int
    weights_bytes: int
    pool_bytes: int
    step_bytes: int | None = None
    pool_copies: int = 1
    state_bytes: int = 0


def pool_size(model: ModelConfig, config: EngineConfig, layout: KVLayout) -> PoolPlan:
    """Sizes the KV pool.

    `num_blocks` is used if given. Otherwise the pool holds max_num_seqs sequences of max_model_len tokens, within
    memory_bytes or, if that is given, memory_fraction of the device without weights and a step. With prefix
    caching and memory_fraction it takes all that remains, because spare blocks keep prefixes.

    Raises:
      ConfigError: not one block fits, or fewer than requested; the message has the figures.
    """
    assert config.max_model_len is not None and config.max_repositioned_sinks is not None
    num_devices = config.tensor_parallel_size
    # Each of several devices has a smaller model. Sums over them are made in place.
    whole, model, layout = model, local_model(model, num_devices), local_layout(layout, num_devices)
    block_bytes, copies = layout.block_bytes, 1 if capabilities().donates else 2
    states = layout.states.nbytes if layout.states else 0
    given = {"packs": config.operators.linear == "packed", "num_devices": num_devices}
    weights = weights_bytes(model, config.dtype, config.embedding_device, config.quantization, **given)
    if (method := read_speculative(config.speculative_config)) is not None:
        block_bytes, weights = block_bytes + method.block_bytes(config), weights + method.weights_bytes(config)
    if config.enable_lora:
        from ksana_jax.models.adapted import adapter_bytes

        itemsize = array_dtype(config.dtype).itemsize
        weights += adapter_bytes(model, config.max_loras, config.max_lora_rank, itemsize, given["packs"])
    _check_host_memory(config.host_cache_bytes)
    of_host = num_devices // config.num_processes * config.data_parallel_size
    if config.num_blocks:
        _check_pool(config.num_blocks, block_bytes, states, weights, copies, of_host)
        return PoolPlan(config.num_blocks, weights, config.num_blocks * block_bytes, None, copies, states)
    wanted, step = config.max_num_seqs * layout.blocks_of(config.max_model_len, config.max_num_batched_tokens), None
    if config.memory_fraction is None:
        affordable = (config.memory_bytes - states) // block_bytes
        if affordable < 1:
            taken = f"a KV block takes {block_bytes:,} bytes" + _besides(states)
            raise ConfigError(f"{taken}, memory_bytes is {config.memory_bytes:,}")
    else:
        largest = largest_shapes(make_buckets(config, platform_of(), model=whole))
        measured = step_bytes(
            model,
            largest,
            dtype=config.dtype,
            quantization=config.quantization,
            kv_dtype=config.kv_dtype,
            kv_full_precision_layers=config.kv_full_precision_layers,
            kv_eviction=config.kv_eviction,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_repositioned_sinks=config.max_repositioned_sinks,
            embedding_device=config.embedding_device,
            settings=config.operators,
        )
        device, step = this_device(of_host), max(found.peak for found in measured) + _input_bytes(model, config)
        budget = int(device.memory_bytes * config.memory_fraction)
        affordable = (budget - weights - step - states * copies) // (block_bytes * copies)
        if affordable < 1:
            raise ConfigError(
                f"memory_fraction {config.memory_fraction} of {byte_size(device.memory_bytes)} ({device.name}) is "
                f"{byte_size(budget)}: weights take {byte_size(weights)}, a step {byte_size(step)}: "
                f"no memory for a KV block of {block_bytes:,} bytes{_besides(states)}{_TWICE if copies > 1 else ''}"
            )
        if config.enable_prefix_caching:
            wanted = affordable
    num_blocks = min(wanted, affordable)
    _check_pool(num_blocks, block_bytes, states, weights, copies, of_host)
    return PoolPlan(num_blocks, weights, num_blocks * block_bytes, step, copies, states)


def _input_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Returns the bytes that recurrent layers keep of the tokens of a step until its drafts are verified."""
    if (spec := model.recurrent) is None:
        return 0
    parts = make_buckets(config, platform_of(), draft_lengths(config)).verifications
    own = array_dtype(config.dtype).itemsize
    of_token = sum(
        count * (np.dtype(kind).itemsize if kind else own) for (count,), kind in spec.inputs(model.d_model).values()
    )
    return max((count * width for count, width in parts), default=0) * len(spec.layers) * of_token


def _besides(states: int) -> str:
    """Returns what a message adds about the states of recurrent layers."""
    return f" besides {byte_size(states)} for states (max_num_seqs, state_snapshots)" if states else ""


def _check_pool(num_blocks: int, block_bytes: int, states: int, weights: int, copies: int, num_devices: int) -> None:
    found = capabilities()
    if not found.shares_host_memory and found.memory_bytes is None:
        return  # its size is unknown
    device, pool = this_device(num_devices), num_blocks * block_bytes + states
    fits, memory = weights + pool * copies <= device.memory_bytes, f"has {byte_size(device.memory_bytes)}"
    if fits and found.shares_host_memory:  # a CPU's pool takes its memory later, when nothing could refuse it
        left = available_bytes() // num_devices
        fits, memory = pool * copies <= left, f"{memory}, {byte_size(left)} of it unused"
    if not fits:
        raise ConfigError(
            f"{num_blocks:,} KV blocks of {block_bytes:,} bytes take {byte_size(pool)} besides "
            f"{byte_size(weights)} of weights{_TWICE if copies > 1 else ''}, {device.name} {memory}: "
            "set num_blocks or memory_bytes"
        )


def _check_host_memory(num_bytes: int) -> None:
    # The system may promise more memory than it has, and kill the process once that is written to.
    if num_bytes > (physical := physical_bytes()):
        raise ConfigError(
            f"host_cache_bytes is {num_bytes:,} ({byte_size(num_bytes)}), this machine has {byte_size(physical)}"
        )


class Compared(NamedTuple):
    """Predicted and measured bytes; None if unknown."""

    predicted: int | None
    measured: int | None

    def __str__(self) -> str:
        known = [f"{byte_size(n)} {name}" for name, n in zip(self._fields, self, strict=True) if n is not None]
        if self.predicted and self.measured:
            known.append(f"{100 * (self.predicted / self.measured - 1):+.1f} %")
        return ", ".join(known) or "not known"


def usage(plan: PoolPlan, runner: Runner, baseline: int | None) -> dict[str, Compared]:
    """Compares a plan with measured memory: weights, pool, step and peak. With several devices, the first one's; on a
    CPU the peak covers all of them, whose memory is the process's.

    Args:
      runner: warmed up; its largest compiled step is taken.
      baseline: resident memory of the process before the weights, `process.resident_bytes`.
    """
    programs = [*runner.programs.values(), *(runner.evictor.programs if runner.evictor else ())]
    sizes = [program_bytes(program) for program in programs]
    known = [size for size in sizes if size is not None]
    measured = max(known, default=None) if len(known) == len(sizes) else None
    leaves = jax.tree.leaves(runner.params)
    weights = sum(map(_on_first, leaves))
    host = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray))
    peak = None
    if plan.step_bytes is not None:
        pools = plan.pool_bytes + plan.state_bytes
        peak = plan.weights_bytes + pools * plan.pool_copies + plan.step_bytes
        if capabilities().shares_host_memory:
            # The peak is the process's: with Python, jax, compiled programs, and data in host memory.
            compiled = compiled_bytes(runner.programs)
            host += sum(x.nbytes for x in (runner.host_blocks, runner.host_states) if x is not None)
            peak = None if baseline is None else baseline + compiled + host + peak * runner.placement.num_local
    return {
        "weights": Compared(plan.weights_bytes, weights),
        "pool": Compared(plan.pool_bytes + plan.state_bytes, sum(map(_on_first, jax.tree.leaves(runner.cache)))),
        "step": Compared(plan.step_bytes, measured),
        "peak": Compared(peak, device_peak_bytes()),
    }


def _on_first(x: Any) -> int:
    """Returns the bytes of an array on the first of its devices; 0 if it is on the host."""
    return x.addressable_shards[0].data.nbytes if isinstance(x, jax.Array) else 0
