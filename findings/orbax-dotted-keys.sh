#!/usr/bin/env bash
# orbax-checkpoint 0.12.8: a key with a dot and a nested key with the same path share one entry of a checkpoint.
#
# Guess: names are escaped, so both arrays come back; or saving refuses the tree.
# Seen: {"layer.bias": zeros, "layer": {"bias": ones}} is saved without a word, and both come back as one of the two,
# which differs from run to run.
# A restore into a target of the same structure gives the same. Only different shapes make saving fail.
# Hurt: whoever keeps tensors under the names of a PyTorch file, which have dots, in one tree with nested parameters,
# such as adapters beside a model or a checkpoint and its converted form: one of the two is lost in silence.
# Versions: Python 3.11, orbax-checkpoint 0.12.8, jax 0.10.2. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - "$folder" <<'END'
import logging
import sys

logging.disable(logging.WARNING)
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

print(f"orbax-checkpoint {ocp.__version__}, jax {jax.__version__}")


def restored(tree, path, target):
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(path, tree)
    checkpointer.wait_until_finished()
    found = checkpointer.restore(path, tree if target else None)
    return found["layer.bias"].tolist(), found["layer"]["bias"].tolist()


tree = {"layer.bias": jnp.zeros(2), "layer": {"bias": jnp.ones(2)}}
seen = [restored(tree, f"{sys.argv[1]}/{target}", target) for target in (False, True)]
print("saved: layer.bias [0, 0] and layer/bias [1, 1]; restored without and with a target:", *seen)
assert all(dotted == nested for dotted, nested in seen), "the behaviour has changed"
END
