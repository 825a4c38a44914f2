"""The table of operators: which implementations each has, what they need, and which one an engine takes."""

from __future__ import annotations

from typing import NamedTuple

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.operator_settings import AUTO, OperatorSettings
from ksana_jax.ops.implementations import choose, implementations
from ksana_jax.ops.linear import LINEAR_IMPLEMENTATIONS, choose_linear
from ksana_jax.ops.norm import NORM_IMPLEMENTATIONS, choose_norm, kinds_of
from ksana_jax.ops.requirements import Requirements


class OperatorRow(NamedTuple):
    """One implementation of one operator.

    operator: "attention", "kv_write", "linear" (products with weights), "norm" or "sampling". name: of the
    implementation. needs: hardware and software that it runs on.
    used: whether the engine takes it. unsupported: why it cannot serve here, or None.
    """

    operator: str
    name: str
    needs: str
    used: bool
    unsupported: str | None


def operator_table(
    config: ModelConfig, needs: Requirements, dtype: str, settings: OperatorSettings = AUTO
) -> list[OperatorRow]:
    """Returns the implementations of all operators, each operator's in order of preference.

    Args:
      needs: of the model and its pool on a device. dtype: NumPy's name of the type of weights and activations.

    Raises:
      ValueError: an implementation that is asked for does not serve.
    """
    platform, kinds, rows = needs.platform, kinds_of(config), []
    attention = choose(needs, settings.attention).name
    for operator in ("attention", "kv_write"):  # each implementation of attention writes the pool that it reads
        rows += [
            OperatorRow(operator, i.name, i.needs, i.name == attention, i.unsupported(needs)) for i in implementations()
        ]
    capability = needs.compute_capability
    linear = choose_linear(platform, dtype, settings.linear, compute_capability=capability).name
    rows += [
        OperatorRow("linear", i.name, i.needs, i.name == linear, i.why_not(platform, dtype, capability))
        for i in LINEAR_IMPLEMENTATIONS
    ]
    norm = choose_norm(platform, dtype, kinds, settings.norm).name
    rows += [
        OperatorRow("norm", i.name, i.needs, i.name == norm, i.unsupported(platform, dtype, kinds))
        for i in NORM_IMPLEMENTATIONS
    ]
    return [*rows, OperatorRow("sampling", "xla", "", True, None)]
