#!/usr/bin/env bash
# jax 0.10.2 and 0.12.0.1 on the CPU: the mean of 64 halves in float8 is 0.25, and the sum of int4 raises.
#
# Guess: reductions of narrow types accumulate in a wider one, as those of bfloat16 (in float32) and int8 (in int32) do.
# Seen: jnp.mean of float8_e4m3fn divides a sum that was rounded to float8 on the way: 0.25 for 64 halves, NaN from about
# 900 of them, where the sum of the exact values passes 448. With dtype=jnp.float32 it is right. jnp.sum of int4 raises
# "Invalid integer data type 'V'", jnp.mean of int4 is right, and jnp.cumsum of int4 wraps at 7.
# Hurt: whoever takes the mean of weights or KV stored in float8 to choose a scale or to compare two versions: the number
# looks plausible.
# Versions: Python 3.11 with jax 0.10.2; also seen with Python 3.12, jax 0.12.0.1. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'END'
import math

import jax
import jax.numpy as jnp

print(f"jax {jax.__version__}")
means = {}
for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
    for count in (8, 64, 1000):
        halves = jnp.full(count, 0.5, dtype)
        means[halves.dtype.name, count] = float(jnp.mean(halves))
        wide = float(jnp.mean(halves, dtype=jnp.float32))
        print(f"mean of {count:4} halves in {halves.dtype.name:13}: {means[halves.dtype.name, count]:g}, in float32: {wide:g}")
        assert wide == 0.5
ones = jnp.ones(9, jnp.int4)
try:
    total = jnp.sum(ones)
except ValueError as error:
    total = str(error)
print(f"nine ones in int4: sum {total!r}, mean {jnp.mean(ones)}, last of cumsum {jnp.cumsum(ones)[-1]}")
assert {means["bfloat16", count] for count in (8, 64, 1000)} == {0.5} == {means["float8_e4m3fn", 8]}
assert means["float8_e4m3fn", 64] == 0.25 and math.isnan(means["float8_e4m3fn", 1000]), "the behaviour has changed"
assert isinstance(total, str) and jnp.mean(ones) == 1 and int(jnp.cumsum(ones)[-1]) == -7, "the behaviour has changed"
END
