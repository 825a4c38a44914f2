"""Ragged paged attention for Hopper, in Mosaic GPU: many queries to a row. Bound by the tensor cores.

A block of threads attends one query tile of 128 rows (queries x query heads of the group) of one kv head, the tiles
with most keys first. Its three warpgroups:

    producer      per piece of 128 keys one TMA box per block: K [128, H], V [128, H] into one of `stages` buffers each
    consumers     two, of 64 rows each; per piece
                    wgmma 64 x 128 x H    scores
                    registers             soft cap, mask (first pieces only), online softmax in base 2
                    wgmma 64 x H x 128    weights as bf16 or f16 from registers, times V; summed in place

The consumers take turns: while one has the tensor cores, the other computes its softmax. Pieces that need a mask come
first and have a loop of their own, so the loop over the others has none; see `hopper_prefill_plan`. The whole pool
comes in with the index of the layer: a slice of it would be a copy.

Source: FlashAttention-3, arXiv:2407.08608, sections 3.1 and 3.2 (warp specialisation, ping-pong).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper_common import LOG2E, ROWS, call, int32, layout, load
from pallas_kernels.hopper_prefill_mask import masked_scores
from pallas_kernels.hopper_prefill_plan import DIRTY, NEWEST, NUM_MASKED, NUM_PIECES, PIECE, Plan
from pallas_kernels.patterns import Pattern

CONSUMERS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """What the kernel is compiled for.

    stages: pieces of keys and values held at once. registers: weights go from registers into the second wgmma, which
    adds to the output in place; else both go another way, which jax's interpreter of GPU programs can follow.
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

    @property
    def staged(self) -> int:
        """Columns of the output that wait in shared memory at once: 128 bytes, or 64 of a head dim of 96."""
        return (128 if self.head_dim % 64 == 0 else 64) // self.out_dtype.itemsize


# _g: in global memory. _s: in shared memory. _bar: barriers at which copies arrive. _read: those at which the consumers
# arrive when they have read what may be overwritten.
def _attend(q_g, pool_g, blocks_g, starts_g, tiles_g, order_g, positions_g, sinks_g, numbers_g, out_g, lse_g, q_s,
            k_s, v_s, p_s, out_s, lse_s, q_bar, k_bar, v_bar, k_read, v_read, turn, *, config: Config):  # fmt: skip
    size, h, stages, kv_heads = config.block_size, config.head_dim, config.stages, config.num_kv_heads
    per_piece = PIECE // size
    group, index = lax.axis_index("group"), lax.axis_index("index")
    head = lax.rem(index, int32(kv_heads))

    # Numbers are read where they are used, and not kept: registers are scarce.
    def tile():
        return order_g[index // kv_heads]

    def number(which):
        return tiles_g[tile(), which]

    def half():
        return (tile() * kv_heads + head) * CONSUMERS + group

    def pattern():
        return Pattern(*(numbers_g[i] for i in range(len(Pattern._fields))))

    def rendezvous():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def my_turn_ends():
        if config.take_turns:
            rendezvous()

    @pl.when(group == CONSUMERS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        row = tile()
        keys = numbers_g[len(Pattern._fields)] * 2 * kv_heads + head

        def fetch(i, _):
            stage = lax.rem(i, int32(stages))
            blocks = [blocks_g[row, i * per_piece + j] + keys for j in range(per_piece)]
            for which, to, arrived, read in ((0, k_s, k_bar, k_read), (1, v_s, v_bar, v_read)):
                pl.when(i >= stages)(lambda read=read: plgpu.barrier_wait(read.at[stage]))
                for j, block in enumerate(blocks):
                    slots = pl.ds(j * size, size)
                    source = pool_g.at[block + which * kv_heads]
                    plgpu.copy_gmem_to_smem(source, to.at[stage, slots], arrived.at[stage])

        lax.fori_loop(0, number(NUM_PIECES), fetch, None)
        # Each completion of a barrier is waited for: also of those that nothing will be fetched after.
        for stage in range(stages):

            @pl.when(stage < number(NUM_PIECES))
            def _(stage=stage):
                plgpu.barrier_wait(k_read.at[stage])
                plgpu.barrier_wait(v_read.at[stage])

    @pl.when(group < CONSUMERS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        plgpu.copy_gmem_to_smem(q_g.at[half()], q_s.at[group], q_bar.at[group])
        plgpu.barrier_wait(q_bar.at[group])

        def key_positions(i, part):
            """Text positions [64] of one part of a piece."""
            slot = lax.broadcasted_iota(jnp.int32, (ROWS,), 0)
            block = i * per_piece + part * ROWS // size
            kv_pos = slot + (starts_g[tile(), block] + part * ROWS % size)
            for j in range(1, ROWS // size):
                kv_pos = jnp.where(slot >= j * size, slot + (starts_g[tile(), block + j] - j * size), kv_pos)
            return kv_pos

        @pl.when(number(NUM_PIECES) > 0)
        def _():
            plgpu.barrier_wait(v_bar.at[0])

        @pl.when((number(NUM_PIECES) > 0) & (number(DIRTY) != 0))
        def _():
            # A weight of 0 does not silence a NaN in a slot that nobody has written. Each consumer sees to 64 slots.
            for part in range(PIECE // ROWS):

                @pl.when(group == part)
                def _(part=part):
                    slots = pl.ds(part * ROWS, ROWS)
                    v = v_s[0, slots]
                    kv_pos = lax.broadcast_in_dim(key_positions(0, part), v.shape, [0])
                    v_s[0, slots] = jnp.where(kv_pos <= number(NEWEST), v, jnp.zeros_like(v))

            plgpu.commit_smem()
            rendezvous()

        if config.take_turns:
            pl.when(group == 1)(rendezvous)

        def attend_piece(i, carry, masked):
            acc, top, total = carry
            stage = lax.rem(i, int32(stages))
            plgpu.barrier_wait(k_bar.at[stage])

            # Masks of all columns at once would not fit the registers.
            parts = PIECE // ROWS if masked else 1
            columns = PIECE // parts

            def scores_of(*refs):
                for j, ref in enumerate(refs):
                    keys = k_s.at[stage, pl.ds(j * columns, columns)]
                    plgpu.wgmma(ref, q_s.at[group], keys.transpose((1, 0)))
                my_turn_ends()
                return tuple(ref[...] for ref in refs)

            scores = pl.run_scoped(scores_of, *[plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32)] * parts)
            plgpu.barrier_arrive(k_read.at[stage])

            scale = LOG2E
            if config.soft_cap is not None:
                scores = tuple(jnp.tanh(s * (1 / config.soft_cap)) for s in scores)
                scale = config.soft_cap * LOG2E
            if masked:

                def positions(part):
                    return load(positions_g, (tile(), group)), key_positions(i, part)

                scores = tuple(masked_scores(s, pattern, functools.partial(positions, j)) for j, s in enumerate(scores))

            new_top = functools.reduce(jnp.maximum, (s.max(axis=1) * scale for s in scores), top)
            # exp2(-inf - 0) is 0 for rows that have seen nothing yet.
            base = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
            fade = jnp.exp2(top - base)
            weights = tuple(jnp.exp2(s * scale - lax.broadcast_in_dim(base, s.shape, [0])) for s in scores)
            total = total * fade + sum(w.sum(axis=1) for w in weights)
            weights = tuple(w.astype(config.dtype) for w in weights)
            acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
            if config.registers:
                acc, total, new_top, weights = lax.optimization_barrier((acc, total, new_top, weights))
            else:
                for j, w in enumerate(weights):
                    p_s[group, :, pl.ds(j * columns, columns)] = w
                plgpu.commit_smem()
            if config.take_turns:
                plgpu.barrier_arrive(turn)
            pl.when(i > 0)(lambda: plgpu.barrier_wait(v_bar.at[stage]))
            if config.take_turns:
                plgpu.barrier_wait(turn)

            def add_values(acc_ref):
                for j, w in enumerate(weights):
                    slots = pl.ds(j * columns, columns)
                    plgpu.wgmma(acc_ref, w if config.registers else p_s.at[group, :, slots], v_s.at[stage, slots])

            def values_of(acc_ref):
                add_values(acc_ref)
                return acc_ref[...]

            if config.registers:
                acc = pl.run_state(add_values)(plgpu.WGMMAAccumulatorRef.init(acc))
            else:
                acc += pl.run_scoped(values_of, plgpu.WGMMAAccumulatorRef(acc.shape, jnp.float32))
            plgpu.barrier_arrive(v_read.at[stage])
            return acc, new_top, total

        state = (
            jnp.zeros((ROWS, h), jnp.float32),
            jnp.full((ROWS,), -jnp.inf, jnp.float32),
            jnp.zeros((ROWS,), jnp.float32),
        )
        state = lax.fori_loop(0, number(NUM_MASKED), functools.partial(attend_piece, masked=True), state)
        others = functools.partial(attend_piece, masked=False)
        acc, top, total = lax.fori_loop(number(NUM_MASKED), number(NUM_PIECES), others, state)
        if config.take_turns:
            pl.when(group == 0)(rendezvous)

        # A learned sink is one more logit, without a value.
        nothing = total == 0.0
        sink = load(sinks_g, head)
        new_top = jnp.where(nothing, 0.0, jnp.maximum(top, sink))
        fade = jnp.exp2(top - new_top)
        total = jnp.where(nothing, 1.0, total * fade + jnp.exp2(sink - new_top))
        lse_s[group] = jnp.where(nothing, -jnp.inf, new_top * (1 / LOG2E) + jnp.log(total))
        acc = acc * lax.broadcast_in_dim(fade / total, acc.shape, [0])
        for i in range(0, h, config.staged):
            out_s[group] = acc[:, i : i + config.staged].astype(config.out_dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s.at[group], out_g.at[half(), :, pl.ds(i, config.staged)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.copy_smem_to_gmem(lse_s.at[group], lse_g.at[half()])
        plgpu.wait_smem_to_gmem(0)


def attend(q, positions, pool, sinks, work: Plan, pattern: Pattern, layer, config: Config, interpret):
    """Output [S*K*2, 64, H] in out_dtype and natural log-sum-exp [S*K*2, 64] float32 of S tiles of 2 x 64 rows.

    Args:
      q: [S*K*2, 64, H]. positions: [S, 2, 64] of the rows.
      sinks: [K, 64] learned sink logits in base 2 of the rows of each kv head; -inf where there are none.
    """
    size, h = config.block_size, config.head_dim
    numbers = jnp.stack([int32(x) for x in (*pattern, layer)])
    tiles = layout(h, 2)
    arrivals = PIECE // size
    buffers = plgpu.SMEM((config.stages, PIECE, h), config.dtype, transforms=tiles)
    arrived = plgpu.Barrier(num_arrivals=arrivals, num_barriers=config.stages)
    read = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=config.stages)
    weights = plgpu.SMEM((CONSUMERS, ROWS, PIECE), config.dtype, transforms=tiles)
    none = plgpu.SMEM((8, 64), config.dtype)  # there is no way to leave an argument out
    kernel = call(
        "hopper_prefill",
        functools.partial(_attend, config=config),
        (work.order.shape[0] * config.num_kv_heads,),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, config.out_dtype),
            jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((CONSUMERS, ROWS, h), config.dtype, transforms=tiles),
            buffers,
            buffers,
            none if config.registers else weights,
            plgpu.SMEM(
                (CONSUMERS, ROWS, config.staged), config.out_dtype,
                transforms=layout(config.staged, config.out_dtype.itemsize),
            ),
            plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=CONSUMERS),
            arrived,
            arrived,
            read,
            read,
            plgpu.Barrier(num_arrivals=CONSUMERS),
        ),
        interpret=interpret,
        warpgroups=CONSUMERS + 1,
    )  # fmt: skip
    return kernel(
        q, pool.reshape(-1, size, h), work.blocks, work.starts, work.tiles, work.order, positions, sinks, numbers
    )
