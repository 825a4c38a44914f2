#!/usr/bin/env bash
# NumPy 2.4.6 with ml_dtypes 0.6.0: one NaN leaves a bfloat16 array unsorted, and the mean of 1,000 ones is 0.256.
#
# Guess: bfloat16 behaves as float16 does: NaN is sorted to the end, means are accumulated in float32.
# Seen: np.sort returns [3, nan, 1, 1] as it is, without a warning; float16 and jax.numpy sort. np.sum and np.mean accumulate in bfloat16 and stop at 256; float16's mean and jax.numpy's are 1.
# Hurt: whoever runs the same code on keys and values by NumPy and by jax.numpy, ranks tokens by scores of which one is NaN,
# or averages weights read from a checkpoint in bfloat16.
# Versions: Python 3.11, NumPy 2.4.6, ml_dtypes 0.6.0, jax 0.10.2. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q numpy==2.4.6 ml_dtypes==0.6.0 jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'END'
import jax.numpy as jnp
import ml_dtypes
import numpy as np

print(f"NumPy {np.__version__}, ml_dtypes {ml_dtypes.__version__}")
with_nan, ones = [3, np.nan, 1, 1], np.ones(1000)
seen = {}
for name, array in (
    ("NumPy float16", lambda x: np.array(x, np.float16)),
    ("NumPy bfloat16", lambda x: np.array(x, ml_dtypes.bfloat16)),
    ("jax bfloat16", lambda x: jnp.array(x, jnp.bfloat16)),
):
    numpy = jnp if name.startswith("jax") else np
    seen[name] = [str(float(x)) for x in numpy.sort(array(with_nan))], float(numpy.mean(array(ones)))
    print(f"{name:14}  sorted: {seen[name][0]}  mean of ones: {seen[name][1]:.3f}")
as_float16 = ["1.0", "1.0", "3.0", "nan"], 1.0
assert seen["NumPy float16"] == seen["jax bfloat16"] == as_float16, "the behaviour has changed"
assert seen["NumPy bfloat16"] == (["3.0", "nan", "1.0", "1.0"], 0.255859375), "the behaviour has changed"
END
