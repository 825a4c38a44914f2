"""Files of `ksana calibrate` with made-up numbers, for methods that need one."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ksana_jax.core.plugins import resolve
from ksana_jax.core.statistics import Statistics
from ksana_jax.kv.eviction import EVICTION_METHODS

_FOLDER = tempfile.TemporaryDirectory(prefix="ksana-statistics-")


def setting_of(method: str, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """{"statistics": a file} if a method needs one. shape: layers, query heads, kv heads, head dimension."""
    kind = getattr(resolve(method, EVICTION_METHODS, "method"), "calibrated_for", None)
    return {} if kind is None else {"statistics": _file(kind, shape)}


@functools.cache
def _file(kind: str, shape: tuple[int, int, int, int]) -> str:
    (layers, heads, kv_heads, size), rng = shape, np.random.default_rng(3)
    factors = rng.standard_normal((layers, heads, size, size), np.float32)
    arrays = {
        "qfilter": {"filters": rng.standard_normal((layers, kv_heads, size), np.float32)},
        "expected_attention": {
            "mean": rng.standard_normal((layers, heads, size), np.float32),
            "covariance": factors @ np.swapaxes(factors, -1, -2) / size,
        },
    }[kind]
    path = Path(_FOLDER.name, f"{kind} {shape}.npz")
    Statistics(kind, "", "made up", "", 0, {}, arrays).write(path)
    return str(path)
