#!/usr/bin/env bash
# jax 0.10.2 on the CPU: device_put(x, may_alias=False) shares the memory of a NumPy array all the same.
#
# Guess: may_alias=False copies, as the docstring of device_put promises.
# Seen: an array of NumPy that is aligned to 64 bytes and an array of jax made from it so are one memory. Numbers that
# are written into the NumPy array later appear in the jax array, which is supposed to be immutable. jnp.array(x)
# copies; jnp.asarray(x) copied too.
# Hurt: whoever hands weights to an engine, then reuses the buffer for the next checkpoint. Answers change, silently.
# Versions: Python 3.11, jax and jaxlib 0.10.2, NumPy 2.4.6. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'END'
import jax
import jax.numpy as jnp
import numpy as np

print(f"jax {jax.__version__}, NumPy {np.__version__}")


def aligned(count):
    memory = np.empty(4 * count + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + 4 * count].view(np.float32)


ways = {
    "device_put(x, may_alias=False)": lambda x: jax.device_put(x, may_alias=False),
    "jnp.array(x)": jnp.array,
    "jnp.asarray(x)": jnp.asarray,
}
shared = {}
for name, make in ways.items():
    source = aligned(1 << 20)
    source[:] = 1
    made = jax.block_until_ready(make(source))
    source[:] = 2
    shared[name] = float(made[0]) == 2
    print(f"{name:32} after the source became 2: {float(made[0]):g}, {'shared' if shared[name] else 'a copy'}")
assert list(shared.values()) == [True, False, False], "the behaviour has changed"
END
