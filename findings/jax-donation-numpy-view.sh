#!/usr/bin/env bash
# jax 0.10.2 on the CPU: a NumPy view that is still alive turns the donation of its array into a silent copy.
#
# Guess: a donated array is deleted, and reading it raises; or jax refuses or warns if its memory is in use elsewhere.
# Seen: with a view from np.asarray alive, the call copies the array, without a warning. The donated array is not
# deleted and can still be read; its result has memory of its own. Once the view is gone, the next call donates.
# Hurt: whoever looks at a KV cache or at weights with np.asarray between steps, and keeps the view, for instance in a
# notebook's output history: each step then copies the whole buffer and memory doubles.
# Versions: Python 3.11, jax and jaxlib 0.10.2, NumPy 2.4.6. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W error - <<'END'
import jax
import jax.numpy as jnp
import numpy as np

print(f"jax {jax.__version__}, NumPy {np.__version__}")
step = jax.jit(lambda pool: pool.at[0].set(1.0), donate_argnums=0)
found = {}
for kept in (False, True):
    pool = jax.block_until_ready(jnp.zeros(1 << 22))
    place = pool.unsafe_buffer_pointer()
    view = np.asarray(pool) if kept else None
    after = jax.block_until_ready(step(pool))
    found[kept] = pool.is_deleted(), after.unsafe_buffer_pointer() == place
    deleted, in_place = found[kept]
    print(f"view alive: {kept!s:5}  donated array deleted: {deleted!s:5}  result in its memory: {in_place}")
    del view
assert found == {False: (True, True), True: (False, False)}, "the behaviour has changed"
END
