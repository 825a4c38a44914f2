"""Made-up matrices in blocks, as the bytes of a GGUF file."""

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.core.gguf_file import TYPES
from ksana_jax.loading.gguf_blocks import apart, decode
from ksana_jax.models.block_matrix import FORMS, BlockMatrix

# By type of blocks: bytes at which a block has its float16 scale and, where there is one, minimum; and the largest
# magnitude of what multiplies the scale.
HALVES = {
    "Q4_0": ((0,), 8),
    "Q4_1": ((0, 2), 15),
    "Q5_0": ((0,), 16),
    "Q5_1": ((0, 2), 31),
    "Q8_0": ((0,), 128),
    "Q2_K": ((80, 82), 45),
    "Q3_K": ((108,), 128),
    "Q4_K": ((0, 2), 63 * 15),
    "Q5_K": ((0, 2), 63 * 31),
    "Q6_K": ((208,), 128 * 32),
    "IQ4_NL": ((0,), 127),
    "MXFP4": ((), 12),
}
KINDS = tuple(HALVES)
# A type of each form.
OF_FORMS = tuple({FORMS[kind]: kind for kind in KINDS}.values())
TYPE = {kind.name: kind for kind in TYPES.values()}


def fitting(kind: str, columns: int) -> int:
    """The next number of columns that are whole blocks."""
    return -(-columns // TYPE[kind].num_values) * TYPE[kind].num_values


def drawn_blocks(kind: str, rows: int, columns: int, seed: int = 0, size: float = 0.3) -> np.ndarray:
    """Blocks uint8 [rows, bytes] of any codes, the outermost included, with scales and minima of both signs.

    size: of the largest numbers.
    """
    rng, (places, largest) = np.random.default_rng(seed), HALVES[kind]
    blocks = rng.integers(0, 256, (rows, columns // TYPE[kind].num_values, TYPE[kind].num_bytes), np.uint8)
    blocks[0, 0, -16:], blocks[0, -1, -16:] = 0x80, 0xFF  # -128 of 8 bits; 15 of 4
    for place in places:
        halves = (rng.normal(size=blocks.shape[:2]) * size / largest).astype("<f2")
        blocks[..., place : place + 2] = halves[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(118, 125, blocks.shape[:2])
    return blocks.reshape(rows, -1)


def block_matrix(kind: str, rows: int, columns: int, dtype="float32", **options) -> tuple[BlockMatrix, np.ndarray]:
    """A matrix as blocks, and its numbers [rows, columns] in float32."""
    blocks = drawn_blocks(kind, rows, columns, **options)
    codes, scales, minima, factors = jax.tree.map(jnp.asarray, apart(kind, blocks))
    return BlockMatrix(codes, scales, minima, jnp.dtype(dtype), factors), decode(kind, blocks)
