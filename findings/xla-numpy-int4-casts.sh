#!/usr/bin/env bash
# jax 0.10.2 against NumPy 2.4.6 with ml_dtypes 0.6.0: a float that int4 or int8 cannot hold saturates in jax, wraps in NumPy.
#
# Guess: both wrap, as casts between integers do in both.
# Seen: under jax on the CPU, 9.0 becomes 7 in int4, 300.0 becomes 127 in int8, and NaN becomes 0. NumPy gives -7 and 44.
# Integers are cut to their low bits by both: int32 9 becomes -7 in int4.
# Hurt: whoever checks a quantiser that jax computes against the same lines in NumPy, without a clip before the cast: codes
# differ only where a scale is too small, so that random data of moderate range show nothing.
# Versions: Python 3.11, jax and jaxlib 0.10.2, NumPy 2.4.6, ml_dtypes 0.6.0. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'END'
import jax
import ml_dtypes
import numpy as np

print(f"jax {jax.__version__}, NumPy {np.__version__}, ml_dtypes {ml_dtypes.__version__}")
seen = {}
for value, dtype in ((np.float32(9), ml_dtypes.int4), (np.float32(300), np.int8), (np.int32(9), ml_dtypes.int4)):
    array = np.array([value])
    by_jax = int(np.asarray(jax.jit(lambda x: x.astype(dtype))(array)).astype(np.int32)[0])
    with np.errstate(all="ignore"):
        by_numpy = int(array.astype(dtype).astype(np.int32)[0])
    seen[f"{array.dtype} {value:g} to {np.dtype(dtype)}"] = by_jax, by_numpy
    print(f"{array.dtype} {value:g} to {np.dtype(dtype)}: jax {by_jax}, NumPy {by_numpy}")
assert list(seen.values()) == [(7, -7), (127, 44), (-7, -7)], "the behaviour has changed"
END
