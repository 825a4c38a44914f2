"""The merge of split pairs on Hopper, run by jax's interpreter of GPU programs on the CPU, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.merge import merge_segments, whole_rows
from pallas_kernels.patterns import FAR, FULL
from pallas_kernels.work import schedule
from tests.pallas_kernels.interpreter import PARAMS, interpreting
from tests.soak import soak_unless

# Pieces of 64 tokens of each row: one in many segments, some of one, one of none, and workers without any.
PIECES = (100, 1, 0, 9, 4)
WORKERS, KV_HEADS = 23, 2
# Head dims and query heads of a group; of 64 and 96 several rows are joined together.
SHAPES = [(64, 3), (96, 3), (128, 4), (256, 1)]


@functools.cache
def arguments_of(head_dim: int, group: int, sinks: bool):
    """Inputs of the merge; results of pairs with one segment are there, all others NaN."""
    rng = np.random.default_rng(head_dim)
    slots = np.arange(max(PIECES)) * 64
    starts = np.where(slots < 64 * np.array(PIECES)[:, None], slots, FAR).astype(np.int32)
    positions = np.maximum(64 * np.array(PIECES, np.int32) - 1, -1)[:, None]
    work = schedule(
        jnp.zeros(starts.shape, jnp.int32),
        jnp.asarray(starts),
        jnp.asarray(positions),
        FULL,
        block_size=64,
        num_kv_heads=KV_HEADS,
        per_block_id=1,
        num_workers=WORKERS,
    )
    pairs, rows = len(PIECES) * KV_HEADS, 8
    count = np.diff(work.of_pair)[:pairs]
    partial = rng.standard_normal((len(work.segments), rows, head_dim), np.float32)
    partial_lse = rng.normal(0, 3, (len(work.segments), 64)).astype(np.float32)
    partial_lse[::3, 0] = -np.inf
    partial[::3, 0] = 0
    out = np.full((pairs, whole_rows(group, head_dim), head_dim), np.nan, np.float32)
    lse = np.full((pairs, 64), np.nan, np.float32)
    for x in (out, lse):
        x[count == 1] = rng.standard_normal(x[count == 1].shape)
    logits = rng.standard_normal((KV_HEADS, 64), np.float32) if sinks else None
    return partial, partial_lse, work, logits, out, lse


def expected(partial, partial_lse, work, sinks, out, lse):
    out, lse = out.copy(), lse.copy()
    for pair, (first, until) in enumerate(zip(work.of_pair, work.of_pair[1 : len(out) + 1])):
        if until - first == 1:
            continue
        weights = np.exp2(partial_lse[first:until].astype(float))
        total = weights.sum(axis=0) + (0 if sinks is None else np.exp2(sinks[pair % KV_HEADS]))
        sums = np.einsum("sr,srh->rh", weights[:, : partial.shape[1]], partial[first:until])
        out[pair] = (sums / np.where(total == 0, 1, total)[: len(sums), None])[: out.shape[1]]
        lse[pair] = np.where(weights.sum(axis=0) > 0, np.log(np.where(total == 0, 1, total)), -np.inf)
    return out, lse


def compare(actual, arguments):
    for found, wanted in zip(actual, expected(*arguments)):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sinks", [True, False], ids=["learned sinks", "no sinks"])
@pytest.mark.parametrize(("head_dim", "group"), soak_unless(SHAPES[1:2].__contains__, SHAPES))
def test_split_pairs_are_joined_empty_ones_cleared_and_others_kept(head_dim, group, sinks):
    arguments = arguments_of(head_dim, group, sinks)
    counts = np.diff(arguments[2].of_pair)[: len(PIECES) * KV_HEADS]
    assert counts.max() > 8 and {0, 1, 2} < set(counts.tolist())
    with interpreting():
        compare(jax.jit(merge_segments, static_argnums=6)(*arguments, PARAMS), arguments)
