"""Layer norms on a CPU, as a custom call into C++."""

from __future__ import annotations

import jax
import numpy as np

from ksana_jax.native.operators import called


def layer_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Normalises x [..., D] with a weight [D], or [2, D] with a bias; the contract of `models.layers.layer_norm`.

    Rows and errors as of `native.operators.rms_norm`.
    """
    return called("ksana_layer_norm", x, weight, (2,) * (weight.ndim > 1) + x.shape[-1:], eps=np.float32(eps))
