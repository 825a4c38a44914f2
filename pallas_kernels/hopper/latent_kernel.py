"""Attention to latents for Hopper, in Mosaic GPU: one vector of a token is its key and its value, for all query heads.

A block of threads attends 64 rows, queries x query heads, and walks its stretch of the work list (`work`); heads beyond
64 are other rows of the same stretch in the next block of threads, which reads the same latents from the L2. A piece of
64 latents comes once and serves both products. Its channels lie in two parts, one for each of the two warpgroups, whose
registers hold those columns of the output:

    TMA, one box per unit and part   [64, right], [64, left] into one of 2 buffers each, 147 KB for 576 channels
    first warpgroup                  wgmma 64 x 64 x right, then left: scores; mask; online softmax in base 2;
                                     weights, the factor of earlier sums and their total go to shared memory
    both                             wgmma 64 x part x 64: weights times their own part, added in place

So scores are computed once, and the second warpgroup multiplies while the first one scores the next piece. Each
warpgroup requests its part of the piece after the next as soon as it has multiplied: the first one has read the
left part before it hands over the weights.

Latents in 8 bits come as codes, scales and rotated numbers into two buffers of 42 KB. Each warpgroup multiplies its
codes by their scales and writes the products, rounded once to bfloat16, to one tile that the wgmmas read; rotated
numbers are read where they came. That rounding, at most 2^-9 of a number, is small next to a code's, 1/254 of the
largest one of 128; scales of scores and weights instead would need four matrices of weights.

Source: multi-head latent attention in its absorbed form, DeepSeek-V2, arXiv:2405.04434, section 2.1; the split of the
output's columns over two warpgroups, and 8 bits that become bfloat16 in shared memory, FlashMLA.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import Pool
from pallas_kernels.hopper import decode_mask as mask
from pallas_kernels.hopper import transposed
from pallas_kernels.hopper.common import LOG2E, ROWS, int32, launch, layout, store
from pallas_kernels.hopper.decode_warpgroup import Place, Stored, store_segment
from pallas_kernels.hopper.latent_warpgroup import (
    FADE,
    OTHER,
    SCORER,
    STAGES,
    TOTAL,
    WIDEST,
    LatentConfig,
    Latents,
    Refs,
)
from pallas_kernels.patterns import Pattern
from pallas_kernels.work import DIRTY, MASK, NUM_PIECES, PIECE, TILE, TILE_KV, Work, unit_tokens


def _attend_stretch(*refs, config: LatentConfig, plain: bool) -> None:
    """The kernel. plain: for jax's interpreter, which does not add in place."""
    group = lax.axis_index("group")
    for number in (SCORER, OTHER):
        pl.when(group == number)(functools.partial(_walk, Refs(*refs), config, plain, number))


def _walk(refs: Any, config: LatentConfig, plain: bool, group: int) -> None:
    """One warpgroup walks the segments of a stretch, two pieces ahead of itself."""
    worker = lax.div(lax.axis_index("index"), int32(config.parts))
    first, until = refs.first_g[worker], refs.first_g[worker + 1]
    warpgroup = Latents(refs, config, plain, group, True, refs.numbers_g[len(Pattern._fields)], until)
    scores = group == SCORER

    @pl.when(first < until)
    def _():
        if not scores:
            plgpu.barrier_arrive(refs.taken)
            return
        if config.rows < ROWS:
            refs.q_s[0] = jnp.zeros(refs.q_s.shape[1:], refs.q_s.dtype)
            plgpu.commit_smem()
        warpgroup.fetch_queries(first)

    ahead = warpgroup.ahead(first, refs.segments_g[jnp.minimum(first, warpgroup.last_segment), PIECE])
    for stage in range(STAGES):
        pl.when(ahead.segment < until)(functools.partial(warpgroup.fetch_part, ahead, int32(stage)))
        ahead = warpgroup.after(ahead)
    lax.fori_loop(first, until, functools.partial(_attend_segment, warpgroup), (int32(0), ahead))
    if scores:  # each completion of a barrier is waited for
        pl.when(first < until)(lambda: plgpu.barrier_wait(refs.taken))


def _attend_segment(warpgroup: Latents, segment, carry):
    """Attends the pieces of one segment and stores its result. carry: pieces seen, the next one to request."""
    refs, scores = warpgroup.refs, warpgroup.group == SCORER
    tile, begin, count = (refs.segments_g[segment, i] for i in (TILE, PIECE, NUM_PIECES))
    if scores:
        plgpu.barrier_wait(refs.q_bar)
    acc = tuple(jnp.zeros((ROWS, width), jnp.float32) for width in warpgroup.columns)
    rows = jnp.full((ROWS,), -jnp.inf, jnp.float32), jnp.zeros((ROWS,), jnp.float32)

    def attend_piece(i, carry):
        acc, rows, n, ahead = carry
        stage = lax.rem(n, int32(STAGES))
        care = refs.care_g[tile, begin + i]
        at = Place(segment, tile, lambda: begin + i, stage, care, care >> 3)
        if warpgroup.quantised:
            warpgroup.wait_and_widen(stage)
        fade, rows = _weigh(warpgroup, at, *rows) if scores else _take_rows(warpgroup, stage, rows[0])
        acc = _add_values(warpgroup, at, acc, fade)
        if not scores:
            plgpu.barrier_arrive(refs.taken)
        plgpu.commit_smem()  # a barrier: all warps have multiplied
        pl.when(ahead.segment < warpgroup.until)(lambda: warpgroup.fetch_part(ahead, stage))
        return acc, rows, n + 1, warpgroup.after(ahead)

    acc, rows, *carry = lax.fori_loop(0, count, attend_piece, (acc, rows, *carry))
    if scores:
        pl.when(segment + 1 < warpgroup.until)(lambda: warpgroup.fetch_queries(segment + 1))
    top, total = rows
    store_segment(warpgroup, segment, top, total, None, functools.partial(_store, warpgroup, acc))
    return tuple(carry)


def _weigh(warpgroup: Latents, at: Place, top, total):
    """Scores a piece and hands over its weights; returns the factor of earlier sums, and the new (top, total)."""
    s = _scores(warpgroup, at)
    s = lax.cond(at.care & MASK != 0, functools.partial(_masked, warpgroup, at), lambda s: s * LOG2E, s)
    new_top = jnp.maximum(top, s.max(axis=1))
    # exp2(-inf - 0) is 0 for rows that have seen nothing yet.
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    fade = jnp.exp2(top - base)
    p = jnp.exp2(s - lax.broadcast_in_dim(base, s.shape, [0]))
    pl.when(at.care & DIRTY != 0)(functools.partial(_silence, warpgroup, at))
    total = total * fade + p.sum(axis=1)
    _hand_over(warpgroup, at.stage, {FADE: fade, TOTAL: total}, p.astype(warpgroup.config.dtype))
    return fade, (new_top, total)


def _scores(warpgroup: Latents, at: Place):
    """Products [64, 64] of the queries with a piece; those of the right part do not wait for the left one."""
    refs, config = warpgroup.refs, warpgroup.config

    def product(acc_ref):
        for group, start in ((SCORER, config.left), (OTHER, 0)):
            _wait_for(warpgroup, at, group)
            for channels in warpgroup.operands(at, group):
                queries = refs.q_s.at[at.zero, :, pl.ds(start, channels.shape[1])]
                plgpu.wgmma(acc_ref, queries, channels.transpose((1, 0)))
                start += channels.shape[1]
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((ROWS, TILE_KV), jnp.float32))


def _wait_for(warpgroup: Latents, at: Place, group: int) -> None:
    """Waits, in the first warpgroup, for the channels of one."""
    refs = warpgroup.refs
    if not warpgroup.quantised:
        plgpu.barrier_wait((refs.right_bar if group == SCORER else refs.left_bar).at[at.stage])
    elif group == OTHER:  # its own ones it has widened
        plgpu.barrier_wait(refs.widened)


def _masked(warpgroup: Latents, at: Place, s):
    """Scores in base 2, -inf where a query does not see a latent."""
    visible = mask.visible(warpgroup.pattern(), *warpgroup.positions(at))
    return jnp.where(visible, s * LOG2E, -jnp.inf)


def _silence(warpgroup: Latents, at: Place) -> None:
    """Zeroes unwritten slots of a piece: a weight of 0 does not silence a NaN."""
    refs = warpgroup.refs
    plgpu.commit_smem()  # a barrier: the products of all warps have read them
    for part_s in (*warpgroup.operands(at, OTHER), *warpgroup.operands(at, SCORER)):
        for i in range(0, part_s.shape[1], ROWS):
            columns = pl.ds(i, ROWS)
            x = part_s[:, columns]
            written = lax.broadcast_in_dim(warpgroup.key_positions(at), x.shape, [0]) <= refs.newest_g[at.tile]
            part_s[:, columns] = jnp.where(written, x, jnp.zeros_like(x))


def _hand_over(warpgroup: Latents, stage, rows: dict[int, Any], weights) -> None:
    """Writes numbers of rows, and weights, for the second warpgroup, after it has taken those before."""
    refs = warpgroup.refs
    plgpu.barrier_wait(refs.taken)
    for which, numbers in rows.items():
        warpgroup.row_numbers(stage, which)[...] = numbers
    refs.p_s[0] = weights
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.handed)


def _take_rows(warpgroup: Latents, stage, top):
    """Waits for a piece's left part and its weights; returns the factor of earlier sums, and (top, the new total)."""
    if not warpgroup.quantised:
        plgpu.barrier_wait(warpgroup.refs.left_bar.at[stage])
    plgpu.barrier_wait(warpgroup.refs.handed)
    fade, total = (warpgroup.row_numbers(stage, which)[...] for which in (FADE, TOTAL))
    return fade, (top, total)


def _add_values(warpgroup: Latents, at: Place, acc, fade):
    """Returns faded sums plus the weights times this warpgroup's part of a piece."""
    acc = tuple(a * lax.broadcast_in_dim(fade, a.shape, [0]) for a in acc)

    def product(*acc_refs):
        parts = ((x, i) for x in warpgroup.operands(at, warpgroup.group) for i in range(0, x.shape[1], WIDEST))
        for a, ref, (channels, start) in zip(acc, acc_refs, parts, strict=True):
            if not warpgroup.plain:
                ref[...] = a
            plgpu.wgmma(ref, warpgroup.refs.p_s.at[at.zero], channels.at[:, pl.ds(start, a.shape[1])])
        return tuple(a + ref[...] if warpgroup.plain else ref[...] for a, ref in zip(acc, acc_refs))

    return pl.run_scoped(product, *(plgpu.WGMMAAccumulatorRef(a.shape, jnp.float32) for a in acc))


def _store(warpgroup: Latents, acc, scale, lse, to: Stored) -> None:
    """Stores this warpgroup's columns of a segment's result, scaled; the first one its log-sum-exp too."""
    config = warpgroup.config
    index, start = to.index * config.parts + warpgroup.part, config.left if warpgroup.group == SCORER else 0
    if warpgroup.group == SCORER:
        store(to.lse_g, (index,), lse)
    for a in acc:
        x = (a * lax.broadcast_in_dim(scale, a.shape, [0])).astype(to.out_g.dtype)
        place = to.out_g.at[index, :, pl.ds(start, a.shape[1])]
        if warpgroup.plain:
            place[...] = x[: to.out_g.shape[1]]
        else:
            transposed.rows_to_global(place, x)
        start += a.shape[1]


def attend_segments(q, positions, pool: Pool, work: Work, numbers, config: LatentConfig, out_type, interpret):
    """Attention of each segment, for each part of the query heads.

    Args:
      q: [S*parts, rows, H], or with fewer rows (`Tiles.pack_queries`). positions: [S, 64] of the rows.
      pool: of latents; where they are codes, q and results have rotated numbers before the others.
      numbers: from `numbers_of`.
      out_type: shape [S*parts, R, H] and dtype of the result, R <= rows.

    Returns:
      [N*parts, rows, H] float32 and [N*parts, 64]: results, normalised, and log2-sum-exp of segments of tiles with
      several. Then of `out_type` and [S*parts, 64]: results and natural log-sum-exp of tiles with one segment. All else
      is not written.
    """
    size, h, n = unit_tokens(config.block_size), config.head_dim, len(work.segments) * config.parts
    left, right = config.left - config.rotated, config.right
    matrix = functools.partial(plgpu.SMEM, dtype=config.dtype, transforms=layout(ROWS, 2))
    stored = functools.partial(plgpu.SMEM, dtype=pool.kv.dtype, transforms=layout(right, pool.kv.dtype.itemsize))
    units, scales, rotated = (
        None if x is None else x.reshape(-1, size, x.shape[5]) for x in (pool.kv, pool.scales, pool.rotated)
    )
    if scales is None:
        of_codes = (None,) * 4
    else:
        of_codes = (
            plgpu.SMEM((STAGES, TILE_KV, scales.shape[2]), scales.dtype),
            *(matrix(shape) for shape in ((STAGES, TILE_KV, config.rotated), (1, TILE_KV, left), (1, TILE_KV, right))),
        )
    arrive = functools.partial(plgpu.Barrier, num_barriers=STAGES)
    copies = TILE_KV // size
    kernel = launch(
        "hopper_latent_attention",
        functools.partial(_attend_stretch, config=config, plain=bool(interpret)),
        (config.num_workers * config.parts,),
        out_type=(
            jax.ShapeDtypeStruct((n, config.rows, h), jnp.float32),
            jax.ShapeDtypeStruct((n, ROWS), jnp.float32),
            out_type,
            jax.ShapeDtypeStruct((out_type.shape[0], ROWS), jnp.float32),
        ),
        scratch_types=(
            matrix((1, ROWS, h)),
            stored((STAGES, TILE_KV, left)),
            stored((STAGES, TILE_KV, right)),
            *of_codes,
            matrix((1, ROWS, TILE_KV)),
            None if config.codes else plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.Barrier(),
            arrive(num_arrivals=copies * (3 if config.codes else 1)),
            arrive(num_arrivals=copies),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier() if config.codes else None,
        ),
        interpret=interpret,
        warpgroups=2,
        auto_barriers=False,
    )
    return kernel(
        q,
        units,
        scales,
        rotated,
        work.units,
        work.starts,
        work.care,
        positions,
        work.newest,
        work.segments,
        work.first,
        work.of_pair,
        numbers,
    )
