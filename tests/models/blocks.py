"""Made-up matrices in blocks, as the bytes of a GGUF file."""

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.core.gguf_file import TYPES
from ksana_jax.loading.gguf_blocks import apart, decode
from ksana_jax.models.block_matrix import BlockMatrix

KINDS = ("Q4_0", "Q4_1", "Q8_0")
BLOCK_BYTES = {kind.name: kind.num_bytes for kind in TYPES.values()}


def drawn_blocks(kind: str, rows: int, columns: int, seed: int = 0, size: float = 0.15) -> np.ndarray:
    """Blocks uint8 [rows, bytes] of any codes, the outermost included, with scales and minima of both signs.

    size: of the numbers.
    """
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // 32, BLOCK_BYTES[kind]), np.uint8)
    halves = 2 if kind == "Q4_1" else 1
    scales = (rng.normal(size=(rows, columns // 32, halves)) * size / (64 if kind == "Q8_0" else 8)).astype("<f2")
    blocks[..., : 2 * halves] = scales.view(np.uint8).reshape(*scales.shape[:-1], -1)
    blocks[0, 0, -16:], blocks[0, -1, -16:] = 0x80, 0xFF  # -128 of 8 bits; 15 of 4
    return blocks.reshape(rows, -1)


def block_matrix(kind: str, rows: int, columns: int, dtype="float32", **options) -> tuple[BlockMatrix, np.ndarray]:
    """A matrix, and the numbers [rows, columns] that it stands for, in float32."""
    blocks = drawn_blocks(kind, rows, columns, **options)
    codes, scales, minima = jax.tree.map(jnp.asarray, apart(kind, blocks))
    return BlockMatrix(codes, scales, minima, jnp.dtype(dtype)), decode(kind, blocks)
