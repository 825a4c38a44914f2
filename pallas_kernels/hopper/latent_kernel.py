"""Attention to latents for Hopper, in Mosaic GPU: one vector of a token is its key and its value, for all query heads.

A block of threads attends 64 rows, queries x query heads, and walks its stretch of the work list (`work`); heads beyond
64 are other rows of the same stretch in the next block of threads, which reads the same latents from the L2. A piece of
64 latents comes once and serves both products. Its channels lie in two parts, one for each of the two warpgroups, whose
registers hold those columns of the output:

    TMA, one box per unit and part   [64, right], [64, left] into one of 2 buffers each, 147 KB for 576 channels
    first warpgroup                  wgmma 64 x 64 x right, then left: scores; mask; online softmax in base 2;
                                     weights and the factor of earlier sums go to shared memory
    both                             wgmma 64 x part x 64: weights times their own part, added in place

So scores are computed once, and the second warpgroup multiplies while the first one scores the next piece. Each
warpgroup requests its part of the piece after the next as soon as it has multiplied: the first one has read the
left part before it hands over the weights.

Source: multi-head latent attention in its absorbed form, DeepSeek-V2, arXiv:2405.04434, section 2.1; the split of the
output's columns over two warpgroups, FlashMLA.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import decode_mask as mask
from pallas_kernels.hopper import transposed
from pallas_kernels.hopper.common import LOG2E, ROWS, Config, fetch_rows, int32, launch, layout, store
from pallas_kernels.hopper.decode_warpgroup import Ahead, Place, Stored, Warpgroup, store_segment
from pallas_kernels.patterns import Pattern
from pallas_kernels.work import DIRTY, MASK, NUM_PIECES, PIECE, TILE, TILE_KV, Work, unit_tokens

STAGES = 2
SCORER, OTHER = range(2)
# Columns of the largest wgmma.
WIDEST = 256
# Rows of `Refs.rows_s`.
FADE, TOP, TOTAL = range(3)


@dataclasses.dataclass(frozen=True)
class LatentConfig(Config):
    """The configuration that the kernel is compiled for. parts: blocks of threads, of 64 rows, for each stretch."""

    sides: int = 1
    parts: int = 1

    @property
    def left(self) -> int:
        """Channels of the second warpgroup: the first ones of a latent."""
        return self.head_dim - self.right

    @property
    def right(self) -> int:
        """Channels of the first warpgroup, which also scores: the fewer, in whole tiles of shared memory."""
        return self.head_dim // 2 // ROWS * ROWS


class Refs(NamedTuple):
    """Arrays of the kernel, in its order: inputs, outputs, scratch.

    _g: in global memory. _s: in shared memory. left_s, right_s: [stages, 64, channels]. p_s: weights. rows_s: numbers
    of each row for the second warpgroup. _bar: barriers at which copies arrive. handed, taken: where the first
    warpgroup arrives once p_s or rows_s are written, and the second one once they may be overwritten.
    """

    q_g: Any
    pool_g: Any
    units_g: Any
    starts_g: Any
    care_g: Any
    positions_g: Any
    newest_g: Any
    segments_g: Any
    first_g: Any
    of_pair_g: Any
    numbers_g: Any
    partial_g: Any
    partial_lse_g: Any
    out_g: Any
    lse_g: Any
    q_s: Any
    left_s: Any
    right_s: Any
    p_s: Any
    rows_s: Any
    q_bar: Any
    left_bar: Any
    right_bar: Any
    handed: Any
    taken: Any
    partial_s: None = None  # results go from registers to global memory
    out_s: None = None


class Latents(Warpgroup):
    """A warpgroup of the kernel; group is known when it is traced."""

    refs: Refs
    config: LatentConfig

    @property
    def part(self):
        """Part of the query heads that this block of threads attends."""
        return lax.rem(lax.axis_index("index"), int32(self.config.parts))

    @property
    def columns(self) -> tuple[int, ...]:
        """Widths of the matrices of this warpgroup's columns of the output."""
        width = self.config.right if self.group == SCORER else self.config.left
        return tuple(min(WIDEST, width - i) for i in range(0, width, WIDEST))

    @property
    def values_s(self):
        return self.refs.right_s if self.group == SCORER else self.refs.left_s

    def fetch_part(self, ahead: Ahead, stage) -> None:
        """Requests this warpgroup's channels of a piece."""
        config, refs = self.config, self.refs
        start, width = (config.left, config.right) if self.group == SCORER else (0, config.left)
        arrives = (refs.right_bar if self.group == SCORER else refs.left_bar).at[stage]
        for i, unit in enumerate(ahead.keys):
            slots = pl.ds(i * config.unit, config.unit)
            channels = refs.pool_g.at[unit, :, pl.ds(start, width)]
            plgpu.copy_gmem_to_smem(channels, self.values_s.at[stage, slots], arrives)

    def fetch_queries(self, segment) -> None:
        index = self.pair(segment) * self.config.parts + self.part
        fetch_rows(self.refs.q_g, index, self.refs.q_s.at[0, pl.ds(0, self.config.rows)], self.refs.q_bar)


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
    rows = (jnp.full((ROWS,), -jnp.inf, jnp.float32), jnp.zeros((ROWS,), jnp.float32)) if scores else ()

    def attend_piece(i, carry):
        acc, rows, n, ahead = carry
        stage = lax.rem(n, int32(STAGES))
        care = refs.care_g[tile, begin + i]
        at = Place(segment, tile, lambda: begin + i, stage, care, care >> 3)
        fade, rows = _weigh(warpgroup, at, *rows) if scores else (_take_fade(warpgroup, stage), ())
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
        _hand_over(warpgroup, {TOP: top, TOTAL: total})
    else:
        plgpu.barrier_wait(refs.handed)
        top, total = refs.rows_s[TOP], refs.rows_s[TOTAL]
        plgpu.barrier_arrive(refs.taken)
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
    _hand_over(warpgroup, {FADE: fade}, p.astype(warpgroup.config.dtype))
    return fade, (new_top, total * fade + p.sum(axis=1))


def _scores(warpgroup: Latents, at: Place):
    """Products [64, 64] of the queries with a piece; those of the right part do not wait for the left one."""
    refs, config = warpgroup.refs, warpgroup.config

    def product(acc_ref):
        plgpu.barrier_wait(refs.right_bar.at[at.stage])
        right = refs.q_s.at[at.zero, :, pl.ds(config.left, config.right)]
        plgpu.wgmma(acc_ref, right, refs.right_s.at[at.stage].transpose((1, 0)))
        plgpu.barrier_wait(refs.left_bar.at[at.stage])
        left = refs.q_s.at[at.zero, :, pl.ds(0, config.left)]
        plgpu.wgmma(acc_ref, left, refs.left_s.at[at.stage].transpose((1, 0)))
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((ROWS, TILE_KV), jnp.float32))


def _masked(warpgroup: Latents, at: Place, s):
    """Scores in base 2, -inf where a query does not see a latent."""
    visible = mask.visible(warpgroup.pattern(), *warpgroup.positions(at))
    return jnp.where(visible, s * LOG2E, -jnp.inf)


def _silence(warpgroup: Latents, at: Place) -> None:
    """Zeroes unwritten slots of a piece: a weight of 0 does not silence a NaN."""
    refs = warpgroup.refs
    plgpu.commit_smem()  # a barrier: the products of all warps have read them
    for part_s in (refs.left_s, refs.right_s):
        for i in range(0, part_s.shape[2], ROWS):
            columns = pl.ds(i, ROWS)
            x = part_s[at.stage, :, columns]
            written = lax.broadcast_in_dim(warpgroup.key_positions(at), x.shape, [0]) <= refs.newest_g[at.tile]
            part_s[at.stage, :, columns] = jnp.where(written, x, jnp.zeros_like(x))


def _hand_over(warpgroup: Latents, rows: dict[int, Any], weights=None) -> None:
    """Writes numbers of rows, and weights, for the second warpgroup, after it has taken those before."""
    refs = warpgroup.refs
    plgpu.barrier_wait(refs.taken)
    for row, numbers in rows.items():
        refs.rows_s[row] = numbers
    if weights is not None:
        refs.p_s[0] = weights
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.handed)


def _take_fade(warpgroup: Latents, stage):
    """Waits for a piece's left part and its weights; returns the factor of earlier sums."""
    plgpu.barrier_wait(warpgroup.refs.left_bar.at[stage])
    plgpu.barrier_wait(warpgroup.refs.handed)
    return warpgroup.refs.rows_s[FADE]


def _add_values(warpgroup: Latents, at: Place, acc, fade):
    """Returns faded sums plus the weights times this warpgroup's part of a piece."""
    acc = tuple(a * lax.broadcast_in_dim(fade, a.shape, [0]) for a in acc)

    def product(*acc_refs):
        start = 0
        for a, ref in zip(acc, acc_refs):
            if not warpgroup.plain:
                ref[...] = a
            columns = pl.ds(start, a.shape[1])
            plgpu.wgmma(ref, warpgroup.refs.p_s.at[at.zero], warpgroup.values_s.at[at.stage, :, columns])
            start += a.shape[1]
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


def attend_segments(q, positions, pool, work: Work, numbers, config: LatentConfig, out_type, interpret):
    """Attention of each segment, for each part of the query heads.

    Args:
      q: [S*parts, rows, H], or with fewer rows (`Tiles.pack_queries`). positions: [S, 64] of the rows.
      pool: [M, L, 1, 1, B, H]. numbers: from `numbers_of`.
      out_type: shape [S*parts, R, H] and dtype of the result, R <= rows.

    Returns:
      [N*parts, rows, H] float32 and [N*parts, 64]: results, normalised, and log2-sum-exp of segments of tiles with
      several. Then of `out_type` and [S*parts, 64]: results and natural log-sum-exp of tiles with one segment. All else
      is not written.
    """
    size, h, n = unit_tokens(config.block_size), config.head_dim, len(work.segments) * config.parts
    matrix = functools.partial(plgpu.SMEM, dtype=config.dtype, transforms=layout(ROWS, 2))
    arrived = plgpu.Barrier(num_arrivals=TILE_KV // size, num_barriers=STAGES)
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
            matrix((STAGES, TILE_KV, config.left)),
            matrix((STAGES, TILE_KV, config.right)),
            matrix((1, ROWS, TILE_KV)),
            plgpu.SMEM((3, ROWS), jnp.float32),
            plgpu.Barrier(),
            arrived,
            arrived,
            plgpu.Barrier(),
            plgpu.Barrier(),
        ),
        interpret=interpret,
        warpgroups=2,
        auto_barriers=False,
    )
    units = pool.reshape(-1, size, h)
    return kernel(
        q,
        units,
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
