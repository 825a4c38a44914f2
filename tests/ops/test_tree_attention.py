"""Attention of trees of drafts against a dense one in float64 with the mask of each tree."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.patterns import FAR, AttentionPattern
from ksana_jax.ops.attention import ragged_paged_attention
from ksana_jax.ops.context import AttentionContext
from ksana_jax.ops.kv_write import Queries
from ksana_jax.ops.pool import KVCache
from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.step.drafts import Drafts
from ksana_jax.scheduler.step.types import StepShape, TileGroup
from ksana_jax.scheduler.step.verification import verification_arrays
from tests.reference import literal

COMPUTED, WIDTH, NUM_BLOCKS = np.array([9, 1, 0, 22]), 7, 64
PARENTS = np.array([[-1, -1, 0, 1, 0, 2], [-1, 0, 1, 0, -1, 4], [-1, 0, 1, 2, 3, 4], [-1, -1, -1, 2, 2, 0]])
COUNTS = np.array([6, 5, 3, 6], np.int32)


def rows_with_blocks(rng, size: int):
    """Rows as far as `verification_arrays` reads them; their blocks lie anywhere in the pool."""
    n = len(COMPUTED)
    width = -(-(COMPUTED.max() + WIDTH) // size)
    held = -(-(COMPUTED + WIDTH) // size)
    tables, starts = np.zeros((1, n, width), np.int32), np.full((1, n, width), FAR, np.int32)
    ids = rng.permutation(NUM_BLOCKS).astype(np.int32)
    for row, count in enumerate(held):
        tables[0, row, :count], ids = ids[:count], ids[count:]
        starts[0, row, :count] = np.arange(count) * size
    return types.SimpleNamespace(
        num_groups=1,
        newest=np.zeros(n, np.int32),
        num_computed=COMPUTED.astype(np.int32),
        num_evicted=np.zeros((1, n), np.int32),
        allocated_until=(held * size).astype(np.int32),
        num_blocks=held[None].astype(np.int32),
        block_tables=tables,
        block_starts=starts,
    )


PATTERNS = (
    AttentionPattern(),
    AttentionPattern(window=3),
    AttentionPattern(window=6, num_sinks=2, sink_position="absolute"),
)


@pytest.mark.parametrize("size", [1, 4])
def test_each_node_sees_the_text_and_its_own_way(size):
    rng = np.random.default_rng(0)
    rows: Rows = rows_with_blocks(rng, size)  # pyright: ignore[reportAssignmentType]
    n = len(COMPUTED)
    drafts = Drafts(np.zeros((n, WIDTH - 1), np.int32), COUNTS, parents=PARENTS)
    shape = StepShape((TileGroup(n, WIDTH),), rows.block_tables.shape[2], n * WIDTH, tree=True)
    batch = verification_arrays(shape, np.arange(n), drafts, rows, size, NUM_BLOCKS)
    assert batch.ancestors is not None
    # Slots to which no query attends hold no numbers.
    kv = np.full((NUM_BLOCKS, 1, 2, 2, size, 8), np.nan, np.float32)
    q = rng.standard_normal((n * WIDTH, 4, 8)).astype(np.float32)
    texts = [rng.standard_normal((2, done + 1 + count, 2, 8)) for done, count in zip(COMPUTED, COUNTS, strict=True)]
    for row, (done, text) in enumerate(zip(COMPUTED, texts, strict=True)):
        at = np.arange(done)
        before = rows.block_tables[0, row, at // size] * size + at % size
        slots = np.append(before, batch.slots[0, row * WIDTH : row * WIDTH + text.shape[1] - done])
        kv[slots // size, 0, :, :, slots % size] = text.swapaxes(0, 1)
    cache = KVCache({"kv": jnp.asarray(kv)}, "f32")

    @jax.jit
    def attended(arrays, pattern):
        context = AttentionContext(0, arrays, shape, pattern, None, 0)  # pyright: ignore[reportArgumentType]
        return ragged_paged_attention(Queries(jnp.asarray(q), None), cache, context).out

    for pattern in PATTERNS:
        out = attended(batch.of_group(0), jax.tree.map(np.int32, pattern.arrays()))
        check(np.asarray(out).reshape(n, WIDTH, 4, 8), q.reshape(n, WIDTH, 4, 8), texts, pattern)


def check(out, q, texts, pattern) -> None:
    for row, (done, text) in enumerate(zip(COMPUTED, texts, strict=True)):
        count = text.shape[1] - done
        assert not out[row, count:].any()
        for node in range(count):
            way, at = [], node
            while at:
                way, at = [done + at, *way], int(PARENTS[row, at - 1]) + 1
            seen = [*range(done + 1), *way]
            visible, _ = literal(pattern, np.array(len(seen) - 1), np.arange(len(seen)))
            k, v = np.repeat(text[:, seen][:, visible], 2, axis=2)
            scores = np.einsum("nh,cnh->nc", q[row, node].astype(np.float64), k)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            expected = np.einsum("nc,cnh->nh", weights / weights.sum(axis=1, keepdims=True), v)
            # float32 against float64, sums of at most 30 numbers
            np.testing.assert_allclose(out[row, node], expected, atol=2e-5)
