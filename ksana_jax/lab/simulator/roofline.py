"""Costs of a machine that is not attached: the larger of two bounds, by published rates. Nothing is measured.

Source: Williams et al., CACM 2009. Weights are read once in a step, keys and values once for each row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError, EngineConfig
from ksana_jax.core.patterns import per_layer
from ksana_jax.kv.engine_layout import make_layout
from ksana_jax.lab.simulator.cost import Cost, HostCost, read_fields
from ksana_jax.lab.simulator.step_size import StepSize
from ksana_jax.loading.config_json import load_config
from ksana_jax.runner.planner.chips import CHIPS

if TYPE_CHECKING:
    from ksana_jax.models.flops import StepFlops


@dataclasses.dataclass(frozen=True, kw_only=True)
class RooflineCost(Cost):
    """Seconds by operations and bytes: step_s + max(operations / flops_per_s, bytes / bytes_per_s).

    flops: operations of a step. weight_bytes: read in each step. kv_token_bytes: of a token's keys and values.
    flops_per_s, bytes_per_s: that are reached. step_s: overhead of a step.
    """

    flops: StepFlops
    weight_bytes: float
    kv_token_bytes: float
    flops_per_s: float
    bytes_per_s: float
    step_s: float = 0.0

    def seconds(self, size: StepSize) -> float:
        flops = self.flops.count(size.num_tokens, size.num_attended, size.num_sampled)
        # The tokens of a row's chunk read its keys and values together.
        kv_tokens = size.num_attended * size.num_rows / size.num_tokens + size.num_tokens
        num_bytes = self.weight_bytes + self.kv_token_bytes * kv_tokens
        return self.step_s + max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RooflineSettings:
    """Fields of a cost of level roofline.

    model: its path or name; no weights are read. chip: a key of CHIPS.
    compute_efficiency, memory_efficiency: shares of the published rates that are reached; assumed.
    step_s: overhead of a step on the device; assumed. host: of the host, see `HostCost`; assumed.
    """

    model: str
    chip: str
    dtype: str = "bf16"
    kv_cache_dtype: Any = "auto"
    quantization: str | None = None
    compute_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    step_s: float = 0.0
    host: HostCost = dataclasses.field(default_factory=HostCost)

    def cost(self) -> RooflineCost:
        """Returns the costs of the model on the chip.

        Raises:
          ConfigError: there is no such chip, no published rate for the dtype, or a share is not one.
          LoadError: there is no such model.
        """
        from ksana_jax.models.flops import StepFlops
        from ksana_jax.runner.planner.terms import weights_bytes

        checks.require(
            checks.one_of("cost.chip", self.chip, CHIPS),
            *(checks.number(f"cost.{n}", getattr(self, n), above=0, high=1) for n in _SHARES),
            checks.number("cost.step_s", self.step_s, 0),
            error=ConfigError,
        )
        chip, model = CHIPS[self.chip], load_config(self.model)
        # Keys and values that layers share are read by each of them.
        reads = model.num_layers / sum(layer.attention.own_kv for layer in model.layers)
        if self.dtype not in chip.flops_per_s:
            known = ", ".join(chip.flops_per_s)
            raise ConfigError(f"cost.dtype is {self.dtype!r}, {chip.name} has published rates for {known}")
        config = EngineConfig(dtype=self.dtype, kv_cache_dtype=self.kv_cache_dtype, quantization=self.quantization)  # pyright: ignore[reportArgumentType]
        # A step reads one row for each token of an embedding that is not also the head.
        without_embedding = "device" if model.tie_embeddings else "host"
        return RooflineCost(
            flops=StepFlops.of(model),
            weight_bytes=float(weights_bytes(model, self.dtype, without_embedding, self.quantization)),
            kv_token_bytes=reads * make_layout(model, per_layer(model.pattern, model.num_layers), config).token_bytes,
            flops_per_s=chip.flops_per_s[self.dtype] * self.compute_efficiency,
            bytes_per_s=chip.bytes_per_s * self.memory_efficiency,
            step_s=self.step_s,
            host=self.host,
            provenance={
                "measured": False,
                "label": f"not measured: published rates of {chip.name} times assumed shares",
                "compute_efficiency": self.compute_efficiency,
                "memory_efficiency": self.memory_efficiency,
            },
        )


_SHARES = ("compute_efficiency", "memory_efficiency")


def read_roofline(given: Mapping[str, Any]) -> RooflineCost:
    """Returns the costs of the fields of a JSON object; see `RooflineSettings`."""
    return read_fields(RooflineSettings, given).cost()
