#!/usr/bin/env bash
# jax 0.10.2 and 0.12.0.1 on the CPU: a program that came from the compilation cache serialises into bytes that do not run.
#
# Guess: jax.experimental.serialize_executable gives the same bytes whether XLA compiled the program or the persistent
# compilation cache had it; or it refuses.
# Seen: after a cache hit, serialize() returns fewer bytes (of larger programs about half), without a warning.
# deserialize_and_load() takes them, and the first call raises NOT_FOUND for a function of the program. The same holds
# for a program that deserialize_and_load() returned. Bytes of a fresh compilation load and run.
# Hurt: whoever ships compiled programs or keeps them on disk with the compilation cache on: the first build works, and
# every later one writes programs that fail in production.
# Versions: Python 3.11 with jax 0.10.2; also seen with Python 3.12, jax 0.12.0.1. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > "$folder/build.py" <<'END'
import pathlib
import pickle
import sys

import jax
import jax.numpy as jnp
from jax.experimental.serialize_executable import deserialize_and_load, serialize

jax.config.update("jax_compilation_cache_dir", f"{sys.argv[1]}/cache")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
program = jax.jit(jnp.sort).lower(jnp.ones(100)).compile()
data = serialize(program)
pathlib.Path(f"{sys.argv[1]}/{sys.argv[2]}").write_bytes(pickle.dumps(data))
if sys.argv[2] == "compiled":
    pathlib.Path(f"{sys.argv[1]}/loaded").write_bytes(pickle.dumps(serialize(deserialize_and_load(*data))))
END
cat > "$folder/load.py" <<'END'
import pathlib
import pickle
import sys

import jax
import jax.numpy as jnp
from jax.experimental.serialize_executable import deserialize_and_load

print(f"jax {jax.__version__}")
seen = {}
for name in ("compiled", "cached", "loaded"):
    data = pickle.loads(pathlib.Path(f"{sys.argv[1]}/{name}").read_bytes())
    try:
        seen[name] = float(deserialize_and_load(*data)(jnp.arange(100.0)[::-1])[0])
    except jax.errors.JaxRuntimeError as error:
        seen[name] = str(error).splitlines()[0]
    print(f"{name:8}  {len(data[0]):,} bytes  first element of the sorted array: {seen[name]}")
assert seen["compiled"] == 0 and all(str(seen[name]).startswith("NOT_FOUND") for name in ("cached", "loaded")), seen
END
export JAX_PLATFORMS=cpu
"$folder/venv/bin/python" "$folder/build.py" "$folder" compiled
"$folder/venv/bin/python" "$folder/build.py" "$folder" cached
"$folder/venv/bin/python" "$folder/load.py" "$folder"
