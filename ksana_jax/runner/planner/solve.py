"""Plans a device's memory for a model: the use of memory, and the largest batch, context and window. Allocates none."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.dtypes import DTYPES
from ksana_jax.core.gguf_file import gguf_of
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.core.sources import commit_of, display_name, model_path
from ksana_jax.loading.config_json import load_config
from ksana_jax.loading.kept import with_kept
from ksana_jax.models.params import num_params
from ksana_jax.runner.planner.devices import Device, compile_target, find_device
from ksana_jax.runner.planner.formula import Memory, largest
from ksana_jax.runner.planner.request import PlanRequest
from ksana_jax.runner.planner.step_memory import NO_STEP, StepCost, measure_step
from ksana_jax.runner.planner.terms import embedding_bytes
from ksana_jax.sharding.shares import local_model


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """A what-if: the limits of a `Plan` with one setting changed."""

    name: str
    weights_bytes: int
    kv_bytes_per_token: int
    mean_bytes_per_token: float
    max_kv_tokens: int
    max_batch: int
    max_context: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory use at a batch and a context, and the largest of each that fits; in bytes on the device, or on each of
    several that divide the model.

    weights_bytes + step_bytes + alpha_bytes_per_request * batch + kv_bytes_per_token * tokens_held = total_bytes.

    state_bytes_per_request: of recurrent layers, a part of alpha.
    host_bytes: weights in host memory. step_bytes: a step's arrays and buffers with no request in it.
    alpha_from: target that the step was compiled for. gamma: tokens_held / (batch * context).
    kv_bytes_per_token: with a block codec, of codes; tokens_held then counts an exact token as several codes.
    mean_bytes_per_token: in a text of `context` tokens, exact tokens included; else equal to kv_bytes_per_token.
    max_kv_tokens: at this batch. max_batch: at this context. max_context: at this batch, even beyond the model's
    training; `config.MAX_TOKENS` means no limit by memory. max_window: at both; None if none fits, or rows evict.
    l2_tokens: tokens whose keys and values fill the last cache before the memory; None if its size is unknown.
    expanded_bytes_per_token: of latents, each of which every device holds whole, what the keys and values of a device's
    heads would take instead, at as many bytes per number; None for a model without latents.
    """

    model: str
    num_params: int
    num_layers: int
    device: str
    device_bytes: int
    budget_bytes: int
    request: PlanRequest
    weights_bytes: int
    host_bytes: int
    step_bytes: int
    alpha_bytes_per_request: int
    state_bytes_per_request: int
    alpha_from: str
    kv_bytes_per_token: int
    mean_bytes_per_token: float
    batch: int
    context: int
    max_position: int
    tokens_held: int
    gamma: float
    total_bytes: int
    fits: bool
    max_kv_tokens: int
    max_batch: int
    max_context: int
    max_window: int | None
    l2_tokens: int | None
    expanded_bytes_per_token: int | None
    changes: tuple[WhatIf, ...]


def plan(
    model: ModelConfig | str | os.PathLike[str],
    device: Device | str | int,
    *,
    step: StepCost | None = None,
    say: Callable[[str], Any] | None = None,
    **request,
) -> Plan:
    """Plans memory.

    Args:
      model: a config, or the path or name of a model (`core.sources.model_path`). No weights are read.
      device: see `find_device`.
      step: of this model, measured before; None compiles some steps, for the device if possible.
      say: called before slow work, with a line.
      request: fields of `PlanRequest`.

    Raises:
      ConfigError: arguments or the model are invalid. LoadError: the model does not exist.
    """
    if unknown := sorted(set(request) - {f.name for f in dataclasses.fields(PlanRequest)}):
        raise ConfigError(f"plan has no argument {', '.join(unknown)}")
    asked = PlanRequest(**request)
    config, name = (model.validate(), model.family) if isinstance(model, ModelConfig) else read_model(model)
    if asked.quantization == "stored":
        config = with_kept(config, model, asked.embedding_device)
    if isinstance(device, (str, int)):
        device = find_device(device)
    budget = int(device.memory_bytes * asked.memory_fraction)
    memory = Memory.of(config, asked, budget, step or NO_STEP)  # refuses before anything is compiled
    if step is None:
        memory = dataclasses.replace(memory, step=_measure(config, asked, device, say))
    return _solve(name, config, device, memory)


def _measure(config: ModelConfig, asked: PlanRequest, device: Device, say: Callable[[str], Any] | None) -> StepCost:
    """Measures a step's memory, from steps compiled for the device if that is possible here.

    With several devices, each computes a step of a smaller model, and sums over them in place.
    """
    target = compile_target(device)
    if target and say:
        say(f"compiling steps for {target.device}: about a minute")
    return measure_step(
        local_model(config, asked.tensor_parallel_size),
        query_tile=asked.query_tile,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        max_repositioned_sinks=asked.num_sinks,
        target=target,
        **asked.of_steps,
    )


def _solve(name: str, config: ModelConfig, device: Device, memory: Memory) -> Plan:
    """Returns the plan at the request's batch and context, or at the largest batch and the model's max_position."""
    asked, step, budget = memory.request, memory.step, memory.budget
    context = asked.context or config.max_position
    max_batch, width = memory.max_batch(context), memory.width(context)
    batch = asked.batch or max(max_batch, 1)
    line = step.line(batch, width)
    held, total = memory.tokens_held(batch, context), memory.total(batch, context)
    return Plan(
        model=name,
        num_params=num_params(config),
        num_layers=config.num_layers,
        device=device.name,
        device_bytes=device.memory_bytes,
        budget_bytes=budget,
        request=asked,
        weights_bytes=memory.weights,
        host_bytes=embedding_bytes(config, asked.dtype) if asked.embedding_device == "host" else 0,
        step_bytes=line.constant(width),
        alpha_bytes_per_request=line.alpha(width) + memory.state,
        state_bytes_per_request=memory.state,
        alpha_from=step.target,
        kv_bytes_per_token=memory.beta,
        mean_bytes_per_token=memory.layout.bytes_per_token(context),
        batch=batch,
        context=context,
        max_position=config.max_position,
        tokens_held=held,
        gamma=held / (batch * context),
        total_bytes=total,
        fits=total <= budget,
        max_kv_tokens=memory.max_kv_tokens(batch, context),
        max_batch=max_batch,
        max_context=memory.max_context(batch),
        max_window=_max_window(config, memory, batch, context),
        l2_tokens=None if device.l2_bytes is None else int(device.l2_bytes // memory.layout.bytes_per_token(context)),
        expanded_bytes_per_token=_expanded(local_model(config, asked.tensor_parallel_size), memory.beta),
        changes=tuple(_changes(config, memory, batch, context)),
    )


def _expanded(local: ModelConfig, token_bytes: int) -> int | None:
    if (latent := local.latent) is None:
        return None
    return token_bytes * latent.expanded(local.num_heads) // latent.head_dim


def read_model(model: str | os.PathLike[str]) -> tuple[ModelConfig, str]:
    """Reads the config of a model, given by path or name; returns it and a name."""
    path = model_path(model, weights=False)
    name = display_name(model if commit_of(path) else gguf_of(path) or path)
    return load_config(path), name.removesuffix(".gguf")


def _max_window(config: ModelConfig, memory: Memory, batch: int, context: int) -> int | None:
    if memory.request.kv_eviction is not None:  # from full-attention layers
        return None

    def fits(window: int) -> bool:
        asked = dataclasses.replace(memory.request, window=window, prefix_share=0.0)
        return Memory.of(config, asked, memory.budget, memory.step).total(batch, context) <= memory.budget

    return largest(context, fits) or None


def _changes(config: ModelConfig, memory: Memory, batch: int, context: int) -> Iterator[WhatIf]:
    """Returns the limits under other settings; the step's buffers are assumed unchanged."""
    for name, model, changed in _variants(config, memory.request, context):
        asked = dataclasses.replace(memory.request, **changed)
        other = Memory.of(model, asked, memory.budget, memory.step)
        yield WhatIf(
            name,
            other.weights,
            other.beta,
            other.layout.bytes_per_token(context),
            other.max_kv_tokens(batch, context),
            other.max_batch(context),
            other.max_context(batch),
        )


def _variants(config: ModelConfig, asked: PlanRequest, context: int) -> Iterator[tuple[str, ModelConfig, dict]]:
    """Yields name, model, and changed fields of the request."""
    for heads, name in ((8, "GQA, 8 kv heads"), (1, "MQA, 1 kv head")):
        if heads < config.num_kv_heads and config.num_heads % heads == 0:
            yield name, dataclasses.replace(config, num_kv_heads=heads), {}
    if asked.dtype == "f32":
        name = "weights and KV in bf16" if asked.kv_cache_dtype == "auto" else "weights in bf16"
        yield name, config, {"dtype": "bf16"}
    if asked.quantization is None:
        yield "weights of layers in int8", config, {"quantization": "int8"}
    if asked.kv_dtype in DTYPES:
        yield "KV in int8", config, {"kv_cache_dtype": "int8"}
    bounded = asked.window is not None or asked.kv_eviction is not None
    if not bounded and config.pattern == AttentionPattern() and not asked.prefix_share:
        window = max(context // 4, 1)
        yield f"window {window:,} + 4 sinks", config, {"window": window, "num_sinks": 4}
        yield "80 % shared prefix", config, {"prefix_share": 0.8}
    if asked.embedding_device == "device" and not config.tie_embeddings:
        yield "embedding on the host", config, {"embedding_device": "host"}
