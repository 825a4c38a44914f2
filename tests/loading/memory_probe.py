"""Prints how many bytes of resident memory loading a checkpoint took at its highest; run in a process of its own.

python memory_probe.py MODEL_DIR DTYPE
"""

import sys


def memory(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes (Linux)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))


if __name__ == "__main__":
    import jax
    import jax.numpy as jnp

    from ksana_jax.loading import load_model

    jax.block_until_ready(jnp.zeros(8) + 1)  # the backend is up: what follows is the checkpoint's
    before = memory("VmRSS")
    config, params = load_model(sys.argv[1], dtype=sys.argv[2])
    peak = memory("VmHWM")
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert weights > 100 * 2**20, "too small: the peak could be that of the imports"
    print(peak - before, weights)
