#!/usr/bin/env bash
# safetensors 0.8.0: the transpose of a NumPy array, or a jax array in column-major layout, is saved with its numbers permuted.
#
# Guess: save() writes what the array holds, as it did until 0.7.0, or refuses an array that is not contiguous.
# Seen: it writes the memory as it lies, under the shape of the view, without an error: [[0, 3], [1, 4], [2, 5]] comes back
# as [[0, 1], [2, 3], [4, 5]]. safetensors.flax does the same to a jax array whose layout is (1, 0), which nothing in its
# shape or values shows. The documentation asks for contiguous arrays.
# Hurt: whoever saves weights.T, as every conversion between [in, out] and [out, in] does: files have the right names,
# shapes and sizes. Code that was right for years is wrong after an upgrade.
# Versions: Python 3.11, safetensors 0.8.0 and 0.7.0, NumPy 2.4.6, jax 0.10.2, flax 0.12.8. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q safetensors==0.7.0 numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8
cat > "$folder/save.py" <<'END'
import sys

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.flax
import safetensors.numpy
from jax.experimental.layout import Format, Layout

here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
made = np.arange(6, dtype=np.float32).reshape(2, 3)
columns = jax.device_put(made, Format(Layout((1, 0)), here))
seen = {}
for name, module, array in (
    ("NumPy, transposed", safetensors.numpy, made.T),
    ("jax, transposed", safetensors.flax, jnp.asarray(made).T),
    ("jax, column-major", safetensors.flax, columns),
):
    back = module.load(module.save({"x": array}))["x"]
    seen[name] = bool((np.asarray(back) == np.asarray(array)).all())
    print(f"safetensors {safetensors.__version__}, {name:17} {np.asarray(array).tolist()} comes back as {back.tolist()}")
assert list(seen.values()) == ([True] * 3 if sys.argv[1] == "right" else [False, True, False]), "the behaviour has changed"
END
export JAX_PLATFORMS=cpu
"$folder/venv/bin/python" "$folder/save.py" right
"$folder/venv/bin/pip" install -q safetensors==0.8.0
"$folder/venv/bin/python" "$folder/save.py" wrong
