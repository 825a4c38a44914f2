"""Mem = M + alpha * BS + beta * TN, and its largest batch, context and window within a budget. Allocates nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import ksana_jax
from ksana_jax.config import ConfigError, ModelConfig
from ksana_jax.kv.patterns import FAR, AttentionPattern, LiveRange, per_layer
from ksana_jax.loading.config_json import load_config
from ksana_jax.loading.load import check_embedding_on_host
from ksana_jax.planner.devices import Device, find_device
from ksana_jax.planner.step_memory import StepCost, measure_step
from ksana_jax.planner.terms import embedding_bytes, kv_bytes_per_token, weights_bytes

MAX_BATCH = 2**20
MAX_CONTEXT = FAR - 1  # the engine's largest text position


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What is planned for.

    batch, context: None takes the largest batch, the model's max_position.
    window, num_sinks: attention pattern of all layers; a window of None takes the model's own pattern.
    kv_dtype: "f32", "bf16" or "int8"; None takes dtype.
    prefix_share: part of each text, from its beginning, that all requests have in common and hold once.
    memory_fraction: of the device, for all that is planned.
    """

    dtype: str = "bf16"
    batch: int | None = None
    context: int | None = None
    window: int | None = None
    num_sinks: int = 0
    kv_dtype: str | None = None
    embedding_device: str = "device"
    prefix_share: float = 0.0
    memory_fraction: float = 0.9
    block_size: int = 16
    max_num_batched_tokens: int = 512
    query_tile: int = 32

    def __post_init__(self):
        for name in ("batch", "context", "window", "block_size", "max_num_batched_tokens", "query_tile"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}, must be a positive integer")
        if self.context is not None and self.context > MAX_CONTEXT:
            raise ConfigError(f"context is {self.context:,}, must be at most {MAX_CONTEXT:,}")
        if self.num_sinks and self.window is None:
            raise ConfigError(f"num_sinks is {self.num_sinks}, but there is no window")
        if not 0 <= self.prefix_share < 1:
            raise ConfigError(f"prefix_share is {self.prefix_share}, must be from 0 to below 1")
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction is {self.memory_fraction}, must be above 0 and at most 1")
        if self.embedding_device not in ("device", "host"):
            raise ConfigError(f"embedding_device is {self.embedding_device!r}, must be one of device, host")


@dataclasses.dataclass(frozen=True)
class Memory:
    """The formula, with all but batch and context known; bytes, unless it says tokens."""

    weights: int
    beta: int
    step: StepCost
    live: LiveRange
    request: PlanRequest
    budget: int

    def tokens_held(self, batch: int, context: int) -> int:
        """TN, in whole blocks: every request holds what its pattern keeps, and one is computing a chunk."""
        r, size = self.request, self.request.block_size
        blocks = self.live.max_live_blocks(size, context)
        of_chunk = self.live.max_live_blocks(size, context, r.max_num_batched_tokens) - blocks
        shared = int(context * r.prefix_share) // size
        return size * (batch * (blocks - shared) + shared + of_chunk)

    def width(self, context: int) -> int:
        """Blocks in a block table."""
        return self.live.max_live_blocks(self.request.block_size, context, self.request.max_num_batched_tokens)

    def total(self, batch: int, context: int) -> int:
        step = self.step.bytes(batch, self.width(context))
        return self.weights + step + self.beta * self.tokens_held(batch, context)

    def max_batch(self, context: int) -> int:
        return _largest(MAX_BATCH, lambda batch: self.total(batch, context) <= self.budget)

    def max_context(self, batch: int) -> int:
        return _largest(MAX_CONTEXT, lambda context: self.total(batch, context) <= self.budget)

    def max_kv_tokens(self, batch: int, context: int) -> int:
        """Tokens of the pool that is left, in whole blocks."""
        left = self.budget - self.weights - self.step.bytes(batch, self.width(context))
        block = self.request.block_size
        return max(left // (self.beta * block), 0) * block


@dataclasses.dataclass(frozen=True)
class Change:
    """What something else than was asked for would make possible, in the same terms as `Plan`."""

    name: str
    weights_bytes: int
    kv_bytes_per_token: int
    max_kv_tokens: int
    max_batch: int
    max_context: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where the memory goes at a batch and a context, and the largest of each; bytes on the device.

    weights_bytes + step_bytes + alpha_bytes_per_request * batch + kv_bytes_per_token * tokens_held = total_bytes.

    host_bytes: weights in host memory. step_bytes: a step's arrays and buffers with no request in it.
    alpha_from: what the step was compiled for. gamma: tokens_held / (batch * context).
    max_kv_tokens: at this batch. max_batch: at this context. max_context: at this batch, whatever the model was trained
    for; 2**30 - 1 is the engine's largest and means that memory sets no limit. max_window: at both; None if none fits.
    l2_tokens: whose keys and values fill the last cache before the memory; None where its size is not known.
    """

    model: str
    num_params: int
    device: str
    device_bytes: int
    budget_bytes: int
    request: PlanRequest
    weights_bytes: int
    host_bytes: int
    step_bytes: int
    alpha_bytes_per_request: int
    alpha_from: str
    kv_bytes_per_token: int
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
    changes: tuple[Change, ...]


def plan(
    model: ModelConfig | str | os.PathLike[str],
    device: Device | str | int,
    *,
    step: StepCost | None = None,
    **request,
) -> Plan:
    """Plans memory.

    Args:
      model: a config, a directory with a config.json, the path of one, or "ksana-tiny". No weights are read.
      device: see `find_device`.
      step: of this model, measured before; None compiles some steps for this machine.
      request: fields of `PlanRequest`.

    Raises:
      ConfigError: arguments or a model that cannot be.
    """
    if unknown := sorted(set(request) - {f.name for f in dataclasses.fields(PlanRequest)}):
        raise ConfigError(f"plan has no argument {', '.join(unknown)}")
    asked = PlanRequest(**request)
    config, name = (model.validate(), model.family) if isinstance(model, ModelConfig) else read_model(model)
    if isinstance(device, (str, int)):
        device = find_device(device)
    if asked.embedding_device == "host":
        check_embedding_on_host(config)
    budget = int(device.memory_bytes * asked.memory_fraction)
    _terms(config, asked)  # what cannot be is said before anything is compiled
    if step is None:
        step = measure_step(
            config, dtype=asked.dtype, block_size=asked.block_size, query_tile=asked.query_tile,
            max_num_batched_tokens=asked.max_num_batched_tokens, embedding_device=asked.embedding_device,
        )  # fmt: skip
    memory = _memory(config, asked, step, budget)
    context = asked.context or config.max_position
    max_batch = memory.max_batch(context)
    batch = asked.batch or max(max_batch, 1)
    line, width = step.line(batch, memory.width(context)), memory.width(context)
    held, total = memory.tokens_held(batch, context), memory.total(batch, context)
    return Plan(
        model=name,
        num_params=config.num_params,
        device=device.name,
        device_bytes=device.memory_bytes,
        budget_bytes=budget,
        request=asked,
        weights_bytes=memory.weights,
        host_bytes=embedding_bytes(config, asked.dtype) if asked.embedding_device == "host" else 0,
        step_bytes=round(line.constant(width)),
        alpha_bytes_per_request=round(line.alpha(width)),
        alpha_from=step.target,
        kv_bytes_per_token=memory.beta,
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
        max_window=_max_window(config, asked, step, budget, batch, context),
        l2_tokens=None if device.l2_bytes is None else device.l2_bytes // memory.beta,
        changes=tuple(_changes(config, asked, step, budget, batch, context)),
    )


def read_model(model: str | os.PathLike[str]) -> tuple[ModelConfig, str]:
    """The config of a directory, of a config.json or of an embedded model, and a name for it."""
    path = Path(model)
    embedded = Path(ksana_jax.__file__).parent / "assets" / str(model)
    if not path.exists() and (embedded / "config.json").is_file():
        path = embedded
    if path.is_file():
        if path.name != "config.json":
            raise ConfigError(f"model {str(model)!r} is a file; must be a config.json or a directory with one")
        path = path.parent
    if not path.is_dir():
        raise ConfigError(f"model {str(model)!r} is neither a directory, nor a config.json, nor an embedded model")
    return load_config(path), path.resolve().name


def _terms(config: ModelConfig, asked: PlanRequest) -> tuple[int, int, LiveRange]:
    """Bytes of weights, bytes per token, and what stays visible."""
    pattern = config.pattern
    if asked.window is not None:
        pattern = AttentionPattern(window=asked.window, num_sinks=asked.num_sinks)
    live = LiveRange.of(per_layer(pattern, config.num_layers))
    if asked.prefix_share and live.window is not None:
        raise ConfigError(f"prefix_share is {asked.prefix_share}, but under a window a shared prefix is let go")
    beta = kv_bytes_per_token(config, asked.kv_dtype or asked.dtype)
    return weights_bytes(config, asked.dtype, asked.embedding_device), beta, live


def _memory(config: ModelConfig, asked: PlanRequest, step: StepCost, budget: int) -> Memory:
    weights, beta, live = _terms(config, asked)
    return Memory(weights, beta, step, live, asked, budget)


def _max_window(config, asked: PlanRequest, step, budget: int, batch: int, context: int) -> int | None:
    def fits(window: int) -> bool:
        windowed = dataclasses.replace(asked, window=window, prefix_share=0.0)
        return _memory(config, windowed, step, budget).total(batch, context) <= budget

    return _largest(context, fits) or None


def _changes(config: ModelConfig, asked: PlanRequest, step: StepCost, budget: int, batch: int, context: int):
    """What would change the result; the step's buffers are taken to stay as they were measured."""
    variants: list[tuple[str, ModelConfig, PlanRequest]] = []
    grouped = [k for k in (8, 1) if k < config.num_kv_heads and config.num_heads % k == 0]
    for heads in grouped:
        name = "MQA: one kv head" if heads == 1 else f"GQA: {heads} kv heads"
        variants.append((name, dataclasses.replace(config, num_kv_heads=heads), asked))
    if asked.window is None and config.pattern == AttentionPattern() and not asked.prefix_share:
        window = max(context // 4, 1)
        name = f"window of {window:,} tokens and 4 sinks"
        variants.append((name, config, dataclasses.replace(asked, window=window, num_sinks=4)))
    kv_dtype = asked.kv_dtype or asked.dtype
    if kv_dtype == "f32":
        variants.append(("KV in bf16", config, dataclasses.replace(asked, kv_dtype="bf16")))
    if kv_dtype != "int8":
        variants.append(("KV in int8", config, dataclasses.replace(asked, kv_dtype="int8")))
    if asked.window is None and not asked.prefix_share:
        name = "80 % of each text is a shared prefix"
        variants.append((name, config, dataclasses.replace(asked, prefix_share=0.8)))
    if asked.embedding_device == "device" and not config.tie_embeddings:
        variants.append(("embedding on the host", config, dataclasses.replace(asked, embedding_device="host")))
    for name, other, request in variants:
        memory = _memory(other, request, step, budget)
        yield Change(
            name, memory.weights, memory.beta, memory.max_kv_tokens(batch, context), memory.max_batch(context),
            memory.max_context(batch),
        )  # fmt: skip


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number in [0, most] that fits, where whatever is smaller fits too; 0 if 1 does not."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
