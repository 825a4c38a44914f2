"""The inputs of a plan. No jax."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ksana_jax.core import checks
from ksana_jax.core.dtypes import canonical_dtype, canonical_kv_dtype
from ksana_jax.core.errors import ConfigError

if TYPE_CHECKING:
    from ksana_jax.core.config import EngineConfig


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """Inputs of a plan; `ksana plan` has most as options.

    dtype: dtype of weights: f32, bf16 or f16.
    quantization: matrices of layers as codes (int8), or as a GGUF file has them (stored).
    kv_cache_dtype: how KV is stored: f32, bf16, f16, int8, fp8_e4m3, fp8_e5m2, int4, int3, int2, kivi4, gear4, ...;
      auto: as the weights.
    kv_full_precision_layers: layers that are stored in the dtype of weights, such as [0].
    kv_eviction: KV eviction, such as {method: h2o, budget: 0.2}; with prompts "whole", a text is planned as one prompt.
    batch: concurrent requests; None takes as many as fit.
    context: tokens per request; None takes the model's max_position.
    window: attention window of all layers, in tokens; None takes the model's own pattern.
    num_sinks: sink tokens, with a window.
    embedding_device: memory of the token embedding: device or host.
    tensor_parallel_size: devices that divide the model; bytes are of each.
    prefix_share: leading fraction of each text that all requests share and that is held once.
    memory_fraction: fraction of the device's memory to use.
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
        # Imported here: the command line, which reads only the fields, starts without NumPy.
        from ksana_jax.core.config import MAX_DEVICES, MAX_TOKENS, QUANTIZATIONS
        from ksana_jax.kv.codecs.registry import check_kv_dtype

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
        from ksana_jax.core.config import EngineConfig

        names = ("dtype", "kv_cache_dtype", "kv_full_precision_layers", "kv_eviction", "block_size")
        names += ("quantization", "embedding_device", "tensor_parallel_size")
        return EngineConfig(**{name: getattr(self, name) for name in names})

    @property
    def kv_dtype(self) -> str | dict[str, Any]:
        """Storage of keys and values: `kv_cache_dtype`, or `dtype` for "auto"."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def of_steps(self) -> dict[str, Any]:
        """Keywords of `step_memory.step_bytes` and `measure_step`."""
        names = ("dtype", "quantization", "kv_dtype", "kv_full_precision_layers", "kv_eviction", "block_size")
        return {name: getattr(self, name) for name in (*names, "embedding_device")}
