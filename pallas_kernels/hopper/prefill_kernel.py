"""Ragged paged attention for Hopper, in Mosaic GPU: many queries to a row. Bound by the tensor cores.

A block of threads attends one query tile of 128 rows (queries x query heads of the group) of one kv head, the tiles
with most keys first. Its three warpgroups:

    producer      per piece of 128 keys one TMA box per unit: K [128, H], V [128, H] into one of `stages` buffers each
    consumers     two, of 64 rows each; per piece
                    wgmma 64 x 128 x H    scores
                    registers             soft cap, online softmax in base 2
                    wgmma 64 x H x 128    weights as bf16 or f16 from registers, times V; summed in place

With a head dim of 256 a piece is 64 keys. The consumers take turns: while one has the tensor cores, the other computes
its softmax. Pieces that need a mask come first, part by part, in a loop of their own, so the loop over the others has
none; see `prefill_work`. Pieces with sinks that second queries score are visited by each of them: it is fetched
over the first query and attends to its own sinks only; the softmax joins what they find. The whole pool comes in with
the index of the layer: a slice of it would be a copy.

Source: FlashAttention-3, arXiv:2407.08608, sections 3.1 and 3.2 (warp specialisation, ping-pong).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.common import LOG2E, ROWS, int32, load
from pallas_kernels.hopper.prefill_mask import key_positions, masked_scores, scored_by
from pallas_kernels.hopper.prefill_work import DIRTY, FIRST_MOVED, NEWEST, NUM_MASKED, NUM_PIECES, TILE, piece_tokens
from pallas_kernels.patterns import Pattern
from pallas_kernels.work import unit_tokens

CONSUMERS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """What the kernel is compiled for.

    stages: pieces of keys and values held at once. registers: weights go from registers into the second wgmma, else
    through shared memory. in_place: it adds to the output, else its sums are added afterwards. jax's interpreter of GPU
    programs can follow neither of the two. num_sink_queries: second queries, J.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    stages: int
    soft_cap: float | None
    take_turns: bool
    registers: bool
    in_place: bool
    num_sink_queries: int

    @property
    def columns(self) -> int:
        """Columns of the output that are summed together: 64 where the sums need registers of their own."""
        return self.head_dim if self.in_place or self.head_dim % 64 else 64

    @property
    def part(self) -> int:
        """Keys that are masked together: masks of a whole piece would not fit the registers."""
        return 64 if self.head_dim <= 128 else 32

    @property
    def staged(self) -> int:
        """Columns of the output that wait in shared memory at once: 128 bytes, or 64 of a head dim of 96."""
        return (128 if self.head_dim % 64 == 0 else 64) // self.out_dtype.itemsize


# _g: in global memory. _s: in shared memory. _bar: barriers at which copies arrive. _read: those at which the consumers
# arrive when they have read what may be overwritten.
def attend_tile(q_g, q_sink_g, pool_g, units_g, starts_g, tiles_g, positions_g, sinks_g, numbers_g, out_g, lse_g, q_s,
           k_s, v_s, p_s, out_s, lse_s, q_bar, k_bar, v_bar, k_read, v_read, turn, *, config: Config):  # fmt: skip
    """The kernel, for one query tile of one kv head; arguments as `prefill` makes them."""
    size, h, stages, kv_heads = unit_tokens(config.block_size), config.head_dim, config.stages, config.num_kv_heads
    piece, parts, width = piece_tokens(h), config.block_size // size, config.columns
    per_piece, num_second = piece // size, config.num_sink_queries
    group, index = lax.axis_index("group"), lax.axis_index("index")
    row, head = index // kv_heads, lax.rem(index, int32(kv_heads))

    # Numbers are read where they are used, and not kept: registers are scarce.
    def number(which):
        return tiles_g[row, which]

    def half():
        return (number(TILE) * kv_heads + head) * CONSUMERS + group

    def pattern():
        return Pattern(*(numbers_g[i] for i in range(len(Pattern._fields))))

    def rendezvous():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    @pl.when(group == CONSUMERS)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        keys = (numbers_g[len(Pattern._fields)] * 2 * kv_heads + head) * parts

        def fetch(i, _):
            stage = lax.rem(i, int32(stages))
            for which, to, arrived, read in ((0, k_s, k_bar, k_read), (1, v_s, v_bar, v_read)):
                pl.when(i >= stages)(lambda read=read: plgpu.barrier_wait(read.at[stage]))
                for j in range(per_piece):
                    source = pool_g.at[units_g[row, i * per_piece + j] + keys + which * kv_heads * parts]
                    plgpu.copy_gmem_to_smem(source, to.at[stage, pl.ds(j * size, size)], arrived.at[stage])

        lax.fori_loop(0, number(NUM_PIECES), fetch, None)
        # Each completion of a barrier is waited for: also of those that nothing will be fetched after.
        for stage in range(stages):

            @pl.when(stage < number(NUM_PIECES))
            def _(stage=stage):
                plgpu.barrier_wait(k_read.at[stage])
                plgpu.barrier_wait(v_read.at[stage])

    @pl.when(group < CONSUMERS)
    def _():
        plgpu.set_max_registers(240, action="increase")

        def fetch_queries(queries):
            plgpu.copy_gmem_to_smem(queries, q_s.at[group], q_bar.at[group])
            plgpu.barrier_wait(q_bar.at[group])

        fetch_queries(q_g.at[half()])

        def part_positions(i, part, columns):
            unit, offset = i * per_piece + part * columns // size, lax.rem(int32(part * columns), int32(size))
            starts = [starts_g[row, unit + j] for j in range(-(-columns // size))]
            return key_positions([starts[0] + offset, *starts[1:]], size, columns)

        @pl.when(number(NUM_PIECES) > 0)
        def _():
            plgpu.barrier_wait(v_bar.at[0])

        @pl.when((number(NUM_PIECES) > 0) & (number(DIRTY) != 0))
        def _():
            # A weight of 0 does not silence a NaN in a slot that nobody has written. Each consumer sees to 64 slots.
            for part in range(piece // ROWS):

                @pl.when(group == part)
                def _(part=part):
                    slots = pl.ds(part * ROWS, ROWS)
                    v = v_s[0, slots]
                    kv_pos = lax.broadcast_in_dim(part_positions(0, part, ROWS), v.shape, [0])
                    v_s[0, slots] = jnp.where(kv_pos <= number(NEWEST), v, jnp.zeros_like(v))

            plgpu.commit_smem()
            rendezvous()

        if config.take_turns:
            pl.when(group == 1)(rendezvous)

        def attend_part(i, carry, part: Any = 0, masked=False, first: Any = True, last: Any = True, visit: Any = -1):
            acc, top, total = carry
            stage = lax.rem(i, int32(stages))
            columns = config.part if masked else piece
            own = pl.ds(0, columns)
            slots = pl.ds(pl.multiple_of(part * columns, columns), columns) if masked else own
            pl.when(first)(lambda: plgpu.barrier_wait(k_bar.at[stage]))

            def scores_of(ref):
                plgpu.wgmma(ref, q_s.at[group], k_s.at[stage, slots].transpose((1, 0)))
                if config.take_turns:
                    rendezvous()
                return ref[...]

            s = pl.run_scoped(scores_of, plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32))
            pl.when(last)(lambda: plgpu.barrier_arrive(k_read.at[stage]))

            scale = LOG2E
            if config.soft_cap is not None:
                s = jnp.tanh(s * (1 / config.soft_cap))
                scale = config.soft_cap * LOG2E
            if masked:

                def positions():
                    return load(positions_g, (row, group)), part_positions(i, part, columns)

                s = masked_scores(s, pattern, positions)
                if num_second:
                    own_keys = functools.partial(scored_by, visit, num_second, pattern, positions)
                    s = lax.cond(visit < 0, lambda s: s, own_keys, s)

            new_top = jnp.maximum(top, s.max(axis=1) * scale)
            # exp2(-inf - 0) is 0 for rows that have seen nothing yet.
            base = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
            fade = jnp.exp2(top - base)
            weights = jnp.exp2(s * scale - lax.broadcast_in_dim(base, s.shape, [0]))
            total = total * fade + weights.sum(axis=1)
            weights = weights.astype(config.dtype)
            acc = tuple(a * lax.broadcast_in_dim(fade, a.shape, [0]) for a in acc)
            if config.registers:
                acc, total, new_top, weights = lax.optimization_barrier((acc, total, new_top, weights))
            else:
                p_s[group, :, own] = weights
                plgpu.commit_smem()
            if config.take_turns:
                plgpu.barrier_arrive(turn)
            pl.when(first & (i > 0))(lambda: plgpu.barrier_wait(v_bar.at[stage]))
            if config.take_turns:
                plgpu.barrier_wait(turn)

            def add_values(ref, which=0):
                values = v_s.at[stage, slots, pl.ds(which * width, width)]
                plgpu.wgmma(ref, weights if config.registers else p_s.at[group, :, own], values)

            def with_values(ref, which):
                add_values(ref, which)
                return acc[which] + ref[...]

            if config.in_place:
                acc = (pl.run_state(add_values)(plgpu.WGMMAAccumulatorRef.init(acc[0])),)
            else:
                ref = plgpu.WGMMAAccumulatorRef((ROWS, width), jnp.float32)
                acc = tuple(pl.run_scoped(functools.partial(with_values, which=j), ref) for j in range(len(acc)))
            pl.when(last)(lambda: plgpu.barrier_arrive(v_read.at[stage]))
            return acc, new_top, total

        num_parts = piece // config.part

        def masked_part(j, carry):
            i, part = j // num_parts, lax.rem(j, int32(num_parts))
            first, last = part == 0, part == num_parts - 1
            if not num_second:
                return attend_part(i, carry, part, True, first, last)
            beyond = i - number(FIRST_MOVED)
            # The first query, and after it each second query; -1 where there is nothing for them.
            visit = jnp.where(beyond < 0, -1, lax.rem(beyond, int32(1 + num_second)))
            i = jnp.where(beyond < 0, i, number(FIRST_MOVED) + beyond // (1 + num_second))
            pl.when(first & (visit > 0))(lambda: fetch_queries(q_sink_g.at[half(), visit - 1]))
            leaves = (visit < 0) | (visit == num_second)
            carry = attend_part(i, carry, part, True, first & (visit <= 0), last & leaves, visit)
            pl.when(last & (visit == num_second))(lambda: fetch_queries(q_g.at[half()]))
            return carry

        state = (
            (jnp.zeros((ROWS, width), jnp.float32),) * (h // width),
            jnp.full((ROWS,), -jnp.inf, jnp.float32),
            jnp.zeros((ROWS,), jnp.float32),
        )
        num_visits = number(NUM_MASKED)
        if num_second:
            num_visits += (number(NUM_MASKED) - number(FIRST_MOVED)) * num_second
        state = lax.fori_loop(0, num_visits * num_parts, masked_part, state)
        acc, top, total = lax.fori_loop(number(NUM_MASKED), number(NUM_PIECES), attend_part, state)
        if config.take_turns:
            pl.when(group == 0)(rendezvous)

        # A learned sink is one more logit, without a value.
        nothing = total == 0.0
        sink = load(sinks_g, head)
        new_top = jnp.where(nothing, 0.0, jnp.maximum(top, sink))
        fade = jnp.exp2(top - new_top)
        total = jnp.where(nothing, 1.0, total * fade + jnp.exp2(sink - new_top))
        lse_s[group] = jnp.where(nothing, -jnp.inf, new_top * (1 / LOG2E) + jnp.log(total))
        scale = lax.broadcast_in_dim(fade / total, acc[0].shape, [0])
        for i in range(0, h, config.staged):
            part = (acc[i // width] * scale)[:, i % width : i % width + config.staged]
            out_s[group] = part.astype(config.out_dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s.at[group], out_g.at[half(), :, pl.ds(i, config.staged)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.copy_smem_to_gmem(lse_s.at[group], lse_g.at[half()])
        plgpu.wait_smem_to_gmem(0)
