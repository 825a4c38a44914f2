"""Operators for `numerics: invariant`: a row's result does not depend on the other rows of a step."""

from __future__ import annotations

from ksana_jax.core import refusals
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.errors import ConfigError
from ksana_jax.models.layers import norm_kind
from ksana_jax.models.mlp import unstated
from ksana_jax.ops.implementations import IMPLEMENTATIONS
from ksana_jax.ops.linear import LINEAR_IMPLEMENTATIONS
from ksana_jax.ops.native_kernels import CODECS
from ksana_jax.ops.norm import kinds_of, not_native
from ksana_jax.ops.requirements import Requirements

# The implementation of attention that computes each row separately.
ROW_BY_ROW = "native"


def check_invariant(config: ModelConfig, needs: Requirements, dtype: str) -> None:
    """Checks that the steps of a model can be computed row by row; arguments as in `why_not_invariant`.

    Raises:
      ConfigError: they cannot, and why.
    """
    unread = needs.codec not in CODECS and f"kv_cache_dtype {needs.codec}"
    refusals.check({refusals.INVARIANT: True, refusals.NOT_NATIVE: unread})
    if reason := why_not_invariant(config, needs, dtype):
        raise ConfigError(f"numerics 'invariant' {reason}")


def why_not_invariant(config: ModelConfig, needs: Requirements, dtype: str) -> str | None:
    """Returns the reason why a model's steps cannot be computed row by row, or None.

    Attention, products with weights and norms that have sums must be those in C++: XLA orders a sum by the shape of the
    whole array. Functions of single numbers (activations, rotation) are left to XLA; sums over the vocabulary have a
    stated order.

    Args:
      needs: of the model and its pool on a device. dtype: NumPy's name of the type of weights and activations.
    """
    attention = next(i for i in IMPLEMENTATIONS if i.name == ROW_BY_ROW)
    linear = [i.unsupported(needs.platform, dtype) for i in LINEAR_IMPLEMENTATIONS if i.row_by_row]
    norms = tuple(kind for kind in kinds_of(config) if not norm_kind(kind).row_by_row)
    reasons = {
        "native attention": attention.unsupported(needs),
        "native products with weights": None if None in linear else linear[-1],
        "norms that are native or row by row": not_native(needs.platform, dtype, norms) if norms else None,
        "MLPs that are row by row": unstated(config, "row_by_row"),
    }
    return next((f"needs {part}: {reason}" for part, reason in reasons.items() if reason), None)
