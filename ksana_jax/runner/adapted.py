"""A runner whose steps add adapters to the model's matrices, each token the adapter of its slot. Knows no requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.models.adapted import LayerAdapter, adaptable, with_lengths, with_slots, write_slot
from ksana_jax.models.params import Params
from ksana_jax.ops.adapter_layout import adapted_form
from ksana_jax.ops.weight_packing import numbers
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.step.types import StepShape


class AdaptedRunner(Runner):
    """The `Runner` of an engine with `enable_lora`.

    Args:
      num_slots: adapters on the device. rank: maximum rank of each.
      others: of `Runner`.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        patterns: Sequence[AttentionPattern],
        *,
        num_slots: int,
        rank: int,
        **others: Any,
    ):
        self._slots = num_slots, rank
        super().__init__(config, params, patterns, **others)

    def weights(self, params: Params, *, consume: bool) -> Params:
        params = super().weights(params, consume=consume)
        linear, place = self.operators.linear, self.placement.everywhere
        return with_slots(params, self.config, *self._slots, linear, place, adapted_form)

    def write_adapter(self, slot: int, layers: Sequence[LayerAdapter]) -> None:
        """Writes an adapter to a slot, for steps that are submitted from now on.

        Args:
          layers: matrices of each layer.
        """
        shapes, written = adaptable(self.config), []
        for p, of_layer, adapter in zip(self.params.layers, shapes, layers, strict=True):
            written.append(write_slot(p, of_layer, slot, adapter))
        self.params = self.params.replace(layers=tuple(written))  # pyright: ignore[reportAttributeAccessIssue]

    def with_lengths(
        self, layers: Sequence[LayerAdapter], lengths: Sequence[Mapping[str, np.ndarray]]
    ) -> tuple[LayerAdapter, ...]:
        """Returns an adapter's layers with the row lengths of some of its matrices, which depend on the model's own.

        Raises:
          RuntimeError: the engine sleeps.
        """
        if isinstance(self.params.final_norm, jax.ShapeDtypeStruct):
            raise RuntimeError("the engine sleeps: call wake_up() first")
        each = zip(self.params.layers, adaptable(self.config), layers, lengths, strict=True)
        return tuple(with_lengths(*of_layer, numbers) for of_layer in each)

    def step_arguments(self, shape: StepShape):
        params, cache, arrays, patterns = super().step_arguments(shape)
        slots = jax.ShapeDtypeStruct((shape.num_tokens,), jnp.int32)
        return params, cache, arrays._replace(adapters=slots), patterns
