"""Prints the peak of resident memory while loading a checkpoint, the bytes of the weights on all devices, and the bytes
read from the files; run in a separate process.

python memory_probe.py MODEL_DIR DTYPE NUM_DEVICES
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
    from ksana_jax.loading.stored_tensor import StoredTensor
    from ksana_jax.sharding.placing import place_on

    taken, num_read = StoredTensor.chunks, 0

    def counted(*arguments):
        global num_read
        for rows, piece in taken(*arguments):
            num_read += piece.nbytes
            yield rows, piece

    StoredTensor.chunks = counted

    jax.block_until_ready(jnp.zeros(8) + 1)  # the backend is up: what follows is the checkpoint's
    before = memory("VmRSS")
    config, params = load_model(sys.argv[1], dtype=sys.argv[2], placement=place_on(int(sys.argv[3])))
    peak = memory("VmHWM")
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert weights > 100 * 2**20, "too small: the peak could be that of the imports"
    print(peak - before, weights, num_read)
