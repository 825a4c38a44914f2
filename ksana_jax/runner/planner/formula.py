"""The formula Mem = M + alpha * BS + beta * TN, and the largest batch, context and pool within a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.config import (
    MAX_DEVICES,
    MAX_SEQS,
    MAX_TOKENS,
    QUANTIZATIONS,
    ConfigError,
    EngineConfig,
    ModelConfig,
)
from ksana_jax.core.dtypes import canonical_dtype, canonical_kv_dtype
from ksana_jax.core.patterns import AttentionPattern, per_layer
from ksana_jax.kv.codecs.registry import check_kv_dtype
from ksana_jax.kv.engine_layout import make_layout
from ksana_jax.kv.layout import KVLayout
from ksana_jax.loading.load import check_embedding_on_host
from ksana_jax.runner.planner.step_memory import StepCost
from ksana_jax.runner.planner.terms import weights_bytes
from ksana_jax.sharding.shares import local_model


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """Inputs of a plan.

    batch, context: None takes the largest batch, and the model's max_position.
    window, num_sinks: attention pattern of all layers; window None takes the model's own pattern.
    dtype, quantization: of weights, see `EngineConfig`.
    kv_cache_dtype: how keys and values are stored; "auto" is dtype; see `EngineConfig`.
    kv_full_precision_layers, kv_eviction: see `EngineConfig`. With prompts "whole", a text is planned as one prompt.
    tensor_parallel_size: devices that divide the model, see `EngineConfig`; bytes are per device.
    prefix_share: leading fraction of each text that all requests share and that is held once.
    memory_fraction: fraction of the device's memory that the plan may use.
    """

    dtype: str = "bf16"
    quantization: str | None = None
    kv_cache_dtype: str | dict[str, Any] = "auto"
    kv_full_precision_layers: tuple[int, ...] = ()
    kv_eviction: dict[str, Any] | None = None
    batch: int | None = None
    context: int | None = None
    window: int | None = None
    num_sinks: int = 0
    embedding_device: str = "device"
    tensor_parallel_size: int = 1
    prefix_share: float = 0.0
    memory_fraction: float = 0.9
    block_size: int = 16
    max_num_batched_tokens: int = 512
    query_tile: int = 32

    def __post_init__(self):
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        object.__setattr__(self, "kv_cache_dtype", canonical_kv_dtype(self.kv_cache_dtype))
        check_kv_dtype(self.kv_dtype)
        checks.require(
            *(checks.integer(name, getattr(self, name), optional=True) for name in ("batch", "window")),
            checks.integer("context", self.context, 1, MAX_TOKENS, optional=True),
            *(checks.integer(n, getattr(self, n)) for n in ("block_size", "max_num_batched_tokens", "query_tile")),
            checks.integer("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_DEVICES),
            checks.number("prefix_share", self.prefix_share, 0, below=1),
            checks.number("memory_fraction", self.memory_fraction, above=0, high=1),
            checks.one_of("embedding_device", self.embedding_device, ("device", "host")),
            checks.one_of("quantization", self.quantization, QUANTIZATIONS),
            error=ConfigError,
        )
        if self.num_sinks and self.window is None:
            raise ConfigError(f"num_sinks is {self.num_sinks}, but window is None")
        if self.prefix_share and self.kv_eviction is not None:
            raise ConfigError(f"prefix_share is {self.prefix_share}, but kv_eviction moves the tokens of shared blocks")
        object.__setattr__(self, "kv_full_precision_layers", self.stored.kv_full_precision_layers)

    @property
    def stored(self) -> EngineConfig:
        """The settings of an engine that say how keys and values are stored."""
        names = ("dtype", "kv_cache_dtype", "kv_full_precision_layers", "kv_eviction", "block_size")
        names += ("quantization", "embedding_device", "tensor_parallel_size")
        return EngineConfig(**{name: getattr(self, name) for name in names})

    @property
    def kv_dtype(self) -> str | dict[str, Any]:
        """Storage of keys and values: `kv_cache_dtype`, or `dtype` for "auto"."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype


@dataclasses.dataclass(frozen=True)
class Memory:
    """The formula with everything but batch and context fixed; in bytes unless a name says tokens.

    layout: layout of a device's KV pool. step: memory of a compiled step.
    """

    weights: int
    layout: KVLayout
    request: PlanRequest
    budget: int
    step: StepCost

    @classmethod
    def of(cls, config: ModelConfig, asked: PlanRequest, budget: int, step: StepCost) -> Memory:
        """Returns the memory of a model under a request, on a device with `budget` bytes.

        Raises:
          ConfigError: model and request are incompatible.
        """
        config = local_model(config, asked.tensor_parallel_size)
        pattern = config.pattern
        if asked.window is not None:
            pattern = AttentionPattern(window=asked.window, num_sinks=asked.num_sinks)
        patterns = per_layer(pattern, config.num_layers)
        # The number of bytes is the same on every platform.
        layout = make_layout(config, patterns, asked.stored)
        if asked.prefix_share and any(g.live.window is not None and not g.residual for g in layout.groups):
            raise ConfigError(f"prefix_share is {asked.prefix_share}, but a window frees the shared prefix")
        if asked.embedding_device == "host":
            check_embedding_on_host(config)
        weights = weights_bytes(config, asked.dtype, asked.embedding_device, asked.quantization)
        return cls(weights, layout, asked, budget, step)

    @property
    def beta(self) -> int:
        """Bytes of a token's keys and values in all layers; with a block codec, of its codes."""
        return self.layout.token_bytes

    def tokens_held(self, batch: int, context: int) -> int:
        """Returns TN in whole blocks: every request holds the tokens its pattern keeps, and one computes a chunk."""
        r, size = self.request, self.request.block_size
        blocks = self.layout.blocks_of(context)
        of_chunk = self.layout.blocks_of(context, r.max_num_batched_tokens) - blocks
        # Exact tokens beside codes are at the end of a text, so they are never shared.
        shared = int(self.layout.num_lasting_groups * -(-context // size) * r.prefix_share)
        # A block holds its tokens in the layers of one group.
        return -(-size * (batch * (blocks - shared) + shared + of_chunk) // self.layout.num_lasting_groups)

    def width(self, context: int) -> int:
        """Returns the width of a block table in blocks."""
        return self.layout.table_width(context, self.request.max_num_batched_tokens)

    def total(self, batch: int, context: int) -> int:
        step = self.step.bytes(batch, self.width(context))
        return self.weights + step + self.beta * self.tokens_held(batch, context)

    def max_batch(self, context: int) -> int:
        return largest(MAX_SEQS, lambda batch: self.total(batch, context) <= self.budget)

    def max_context(self, batch: int) -> int:
        return largest(MAX_TOKENS, lambda context: self.total(batch, context) <= self.budget)

    def max_kv_tokens(self, batch: int, context: int) -> int:
        """Returns the tokens of the pool that fits the remaining memory, in whole blocks; with a block codec, in texts
        of `context` tokens."""
        left = self.budget - self.weights - self.step.bytes(batch, self.width(context))
        block = self.request.block_size
        return max(int(left // (self.layout.bytes_per_token(context) * block)), 0) * block


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number in [0, most] that fits, assuming that all smaller numbers fit too; 0 if 1 does not."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
