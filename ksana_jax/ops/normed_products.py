"""Products of what a norm gives with several packed matrices, in one call into C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ksana_jax.core.layer_spec import NormSpec
from ksana_jax.native.operators import Weights, project
from ksana_jax.ops.native_operators import are_packed, norms_of


def normed_products(x: jax.Array, norm: jax.Array, norms: NormSpec, matrices: Sequence[Any]) -> list[jax.Array] | None:
    """Normalises rows x [..., D] and multiplies them by up to three matrices [out, in]: [..., out] of each. None if
    these are not packed, or the norm is none of C++."""
    kind = norms_of(norms)
    if kind is None or not are_packed(*matrices):
        return None
    return project(x, [Weights.of(w, None) for w in matrices], norm=norm, norms=kind)
