"""The Hopper kernel for many queries, run by jax's interpreter of GPU programs on the CPU, against the reference."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper_prefill
from pallas_kernels.arguments import DILATED, GLOBAL, SINKS, SINKS_MOVED, WINDOW, Spec, layout, make
from pallas_kernels.hopper_prefill_plan import DIRTY, NEWEST, NUM_MASKED, NUM_PIECES, PIECE, plan
from pallas_kernels.patterns import FAR, Pattern
from tests.pallas_kernels.contract import check
from tests.pallas_kernels.interpreter import PARAMS, interpreting, several_warpgroups

# Each compiles anew: the interpreter of jax 0.10 cannot run the same program twice.
SPECS = (
    # 128 rows to a tile; the chunk's second tile is partly padded; one row is empty.
    Spec(rows=((300, 40), (0, 0)), q_tile=32, num_kv_heads=1, sink_logits=True, return_lse=True),
    Spec(rows=((290, 31),), q_tile=32, num_heads=8, head_dim=128, block_size=64, soft_cap=15.0, pattern=SINKS),
    # Tiles of more queries than 128 rows hold, a group of 3 whose 63 rows are padded, blocks as long as a piece.
    Spec(rows=((290, 45),), q_tile=45, num_heads=3, num_kv_heads=1, head_dim=96, block_size=128, dtype="float16",
         pattern=DILATED),
)  # fmt: skip


@several_warpgroups
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_prefill_kernel_equals_the_reference_without_races(spec):
    with interpreting():
        check(hopper_prefill.ragged_paged_attention, spec, interpret=PARAMS)


@several_warpgroups
def test_layers_can_share_a_plan_made_before():
    def attend(q, pool, tables, starts, positions, *, pattern, **keywords):
        work = hopper_prefill.plan_work(tables, starts, positions, pool, pattern, num_query_heads=q.shape[2])
        # Without a table nothing but the plan says where the keys are.
        return hopper_prefill.ragged_paged_attention(
            q, pool, jnp.zeros_like(tables), jnp.zeros_like(starts), positions, pattern=pattern, work=work,
            interpret=PARAMS, **keywords,
        )  # fmt: skip

    spec = Spec(rows=((300, 40),), q_tile=32, num_kv_heads=1, block_size=32, evict_every=3, pattern=GLOBAL)
    with interpreting():
        check(attend, dataclasses.replace(spec, return_lse=True))


@pytest.mark.parametrize("pattern", [Pattern(), WINDOW, SINKS, DILATED, GLOBAL], ids=str)
@pytest.mark.parametrize("block_size", [16, 128])
def test_the_plan_has_what_is_seen_and_masks_what_is_not_seen_by_all(pattern, block_size):
    spec = Spec(rows=((700, 70), (0, 0), (3, 3)), q_tile=32, block_size=block_size, evict_every=4, pattern=pattern)
    tables, starts, positions, _ = layout(spec)
    arrays = (jnp.asarray(tables), jnp.asarray(starts), jnp.asarray(positions))
    work = plan(*arrays, pattern, block_size=block_size, rows_per_block_id=10)
    blocks, begin, tiles = (np.asarray(x).tolist() for x in (work.blocks, work.starts, work.tiles))
    per_piece = PIECE // block_size
    for i, (num_pieces, num_masked, dirty, newest) in enumerate(tiles):
        queries = positions[i][positions[i] >= 0]

        def seen(start, queries=queries):
            return np.asarray(pattern.visible(queries[:, None], start + np.arange(block_size)))

        live = {(t * 10, s) for t, s in zip(tables[i].tolist(), starts[i].tolist()) if s < FAR and seen(s).any()}
        count = num_pieces * per_piece
        assert {x for x in zip(blocks[i][:count], begin[i]) if x[1] < FAR} == live
        assert newest == (queries.max() if len(queries) else -1)
        assert set(blocks[i][:count]) <= {block for block, _ in live}
        for piece in range(num_pieces):
            part = begin[i][piece * per_piece : (piece + 1) * per_piece]
            assert piece < num_masked or all(seen(s).all() for s in part)
            unwritten = any(s + block_size - 1 > newest for s in part if s < FAR)
            assert not unwritten or (piece == 0 and dirty)
    assert [tiles[i][NUM_PIECES] for i in work.order] == sorted((t[NUM_PIECES] for t in tiles), reverse=True)
    assert all(t[NUM_MASKED] <= t[NUM_PIECES] for t in tiles) and tiles[0][DIRTY] in (0, 1) and tiles[0][NEWEST] == 661


def test_what_the_kernel_lacks_is_named():
    def attempt(**changes):
        spec = dataclasses.replace(Spec(rows=((5, 5),), q_tile=32), **changes)
        (q, *rest), given = make(spec)
        hopper_prefill.ragged_paged_attention(q, *rest, **given, interpret=PARAMS)

    for changes, message in (
        (dict(head_dim=256), "head dim of 256"),
        (dict(block_size=8), "blocks of 8 tokens"),
        (dict(num_heads=130, num_kv_heads=1), "130 query heads to a kv head"),
        (dict(dtype="float32"), "keys and values in float32"),
        (dict(sink_queries=1, pattern=SINKS_MOVED), "second queries"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            attempt(**changes)
