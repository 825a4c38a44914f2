#!/usr/bin/env bash
# jax 0.10.2 and 0.12.0.1 on the CPU: jax.lax.top_k ranks a NaN by its sign: 0 / 0 comes last, jnp.nan comes first.
#
# Guess: top_k agrees with jnp.argmax and jnp.sort, which treat every NaN as the largest number.
# Seen: top_k orders by the bits. A NaN that arithmetic makes on x86 (0 / 0, inf - inf, sqrt(-1), softmax of a row of
# -inf) has its sign bit set and counts as less than -inf; the constant jnp.nan has not and counts as more than inf.
# 0.0 counts as more than -0.0, while argmax takes the first of the two.
# Hurt: whoever checks the best score of top_k for NaN, in sampling or in the choice of tokens to keep: tests that put in
# jnp.nan pass, and a NaN that the model computes is never chosen and never seen.
# Versions: Python 3.11 with jax 0.10.2; also seen with Python 3.12, jax 0.12.0.1. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'END'
import jax
import jax.numpy as jnp

print(f"jax {jax.__version__}")
rows = {
    "[1, 0 / 0, 3]": jnp.array([1.0, 0.0, 3.0]) / jnp.array([1.0, 0.0, 1.0]),
    "[1, jnp.nan, 3]": jnp.array([1.0, jnp.nan, 3.0]),
    "[-0.0, 0.0]": jnp.array([-0.0, 0.0]),
}
seen = {}
for name, row in rows.items():
    seen[name] = int(jax.lax.top_k(row, 1)[1][0]), int(jnp.argmax(row)), int(jnp.argsort(-row)[0])
    print(f"{name:16} of index {seen[name][0]} by top_k, {seen[name][1]} by argmax; values by top_k: {jax.lax.top_k(row, 2)[0]}")
worst = jax.lax.top_k(jnp.concatenate([rows["[1, 0 / 0, 3]"], jnp.array([-jnp.inf])]), 4)[0]
print("with -inf, all four by top_k:", worst)
assert jnp.isnan(worst[3]) and not jnp.isnan(worst[:3]).any(), "the behaviour has changed"
assert {name: found[:2] for name, found in seen.items()} == {
    "[1, 0 / 0, 3]": (2, 1),
    "[1, jnp.nan, 3]": (1, 1),
    "[-0.0, 0.0]": (1, 0),
}, "the behaviour has changed"
END
