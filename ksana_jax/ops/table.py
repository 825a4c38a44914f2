"""The table of operators: each one's implementations, their requirements, and the engine's choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.operator_settings import AUTO, OperatorSettings
from ksana_jax.ops.implementations import choose, implementations
from ksana_jax.ops.linear import LINEAR_IMPLEMENTATIONS, choose_linear
from ksana_jax.ops.norm import NORM_IMPLEMENTATIONS, choose_norm, kinds_of
from ksana_jax.ops.recurrent import RECURRENT_IMPLEMENTATIONS, choose_recurrent
from ksana_jax.ops.requirements import Requirements


class OperatorRow(NamedTuple):
    """One implementation of one operator.

    operator: "attention", "kv_write", "linear" (products with weights), "norm", "sampling" or, of models with such
      layers, "recurrent". name: of the implementation. needs: hardware and software that it runs on.
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
      ValueError: a requested implementation does not serve.
    """
    attention, capability = choose(needs, settings.attention).name, needs.compute_capability
    spec = config.recurrent
    used = {
        "attention": attention,
        "kv_write": attention,
        "linear": choose_linear(needs.platform, dtype, settings.linear, compute_capability=capability).name,
        "norm": choose_norm(needs.platform, dtype, kinds_of(config), settings.norm).name,
        "recurrent": spec and choose_recurrent(needs.platform, dtype, spec, settings.recurrent).name,
    }
    rows = [
        OperatorRow(operator, found.name, found.needs, found.name == used[operator], why)
        for operator, found, why in _implementations(config, needs, dtype)
    ]
    return [*rows, OperatorRow("sampling", "xla", "", True, None)]


def serving(config: ModelConfig, needs: Requirements, dtype: str) -> dict[str, list[Any]]:
    """Returns the implementations that serve, by operator but for sampling, each in order of preference.

    Args:
      needs, dtype: as for `operator_table`.
    """
    found: dict[str, list[Any]] = {}
    for operator, implementation, why in _implementations(config, needs, dtype):
        found.setdefault(operator, []).extend([implementation] * (why is None))
    return found


def _implementations(config: ModelConfig, needs: Requirements, dtype: str) -> Iterator[tuple[str, Any, str | None]]:
    """Yields (operator, implementation, why it cannot serve)."""
    platform, kinds, capability = needs.platform, kinds_of(config), needs.compute_capability
    for operator in ("attention", "kv_write"):  # each implementation of attention writes the pool that it reads
        yield from ((operator, i, i.unsupported(needs)) for i in implementations())
    yield from (("linear", i, i.why_not(platform, dtype, capability)) for i in LINEAR_IMPLEMENTATIONS)
    yield from (("norm", i, i.unsupported(platform, dtype, kinds)) for i in NORM_IMPLEMENTATIONS)
    if config.recurrent is not None:
        yield from (
            ("recurrent", i, i.unsupported(platform, dtype, config.recurrent)) for i in RECURRENT_IMPLEMENTATIONS
        )
