"""Ragged paged attention for Hopper, in Mosaic GPU: many queries to a row. Bound by the tensor cores.

A block of threads attends one query tile of 128 rows (queries x query heads of the group) of one kv head, the tiles
with most keys first. Its three warpgroups:

    producer      per piece of 128 keys one TMA box per unit: K [128, H], V [128, H] into one of `stages` buffers each;
                  codes of a quantised pool it widens into these buffers, see `prefill_widen`
    consumers     two, of 64 rows each; per piece
                    wgmma 64 x 128 x H    scores
                    registers             soft cap, online softmax in base 2
                    wgmma 64 x H x 128    weights as bf16 or f16 from registers, times V; summed in place

With a head dim of 256 a piece is 64 keys. The consumers take turns: while one has the tensor cores, the other computes
its softmax. Pieces that need a mask come first, part by part, in a separate loop. The loop over the others has no
mask, and gives the scores of a piece and the values of the previous one to the tensor cores together; see
`prefill_turns` and `prefill_work`. Pieces with sinks that sink queries score are visited by each of them, which is
fetched over the first query and attends to its own sinks only; the softmax joins the results. The whole pool comes in
with the index of the layer: a slice of it would be a copy.

Source: FlashAttention-3, arXiv:2407.08608, sections 3.1 and 3.2 (warp specialisation, ping-pong,
products and softmax of a warpgroup overlapped).
"""

from __future__ import annotations

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.common import ROWS, finished, int32, load
from pallas_kernels.hopper.prefill_turns import State, attend_masked, attend_unmasked
from pallas_kernels.hopper.prefill_warpgroup import CONSUMERS, Config, Refs, Warpgroup
from pallas_kernels.hopper.prefill_widen import produce as widen_pieces
from pallas_kernels.hopper.prefill_work import DIRTY, FIRST_REPOSITIONED, NEWEST, NUM_MASKED, NUM_PIECES, SPLIT


def attend_tile(*refs, config: Config) -> None:
    """The kernel, for one query tile of one kv head; `prefill` makes the arguments."""
    group, index = lax.axis_index("group"), lax.axis_index("index")
    row, head = index // config.num_kv_heads, lax.rem(index, int32(config.num_kv_heads))
    warpgroup = Warpgroup(Refs(*refs), config, group, row, head)
    pl.when(group == CONSUMERS)(lambda: _produce(warpgroup))
    pl.when(group < CONSUMERS)(lambda: _consume(warpgroup))


def _produce(warpgroup: Warpgroup) -> None:
    """Brings keys and values, `stages` pieces ahead of the consumers."""
    refs, config = warpgroup.refs, warpgroup.config
    (_copy if config.codes is None else widen_pieces)(warpgroup)
    # Each completion of a barrier is waited for, even if nothing more will be fetched after it.
    for stage in range(config.stages):

        @pl.when(stage < warpgroup.number(NUM_PIECES))
        def _(stage=stage):
            plgpu.barrier_wait(refs.k_read.at[stage])
            plgpu.barrier_wait(refs.v_read.at[stage])


def _copy(warpgroup: Warpgroup) -> None:
    """Copies all pieces."""
    refs, config = warpgroup.refs, warpgroup.config
    plgpu.set_max_registers(config.producer_registers, action="decrease")
    first = warpgroup.first_unit()

    def fetch(i, _):
        stage = warpgroup.stage(i)
        buffers = (refs.k_s, refs.k_bar, refs.k_read), (refs.v_s, refs.v_bar, refs.v_read)
        for which, (to, arrived, read) in enumerate(buffers):
            pl.when(i >= config.stages)(lambda read=read: plgpu.barrier_wait(read.at[stage]))
            for j in range(config.units_of_piece):
                slots = pl.ds(j * config.unit, config.unit)
                unit = refs.pool_g.at[warpgroup.unit_index(first, i, j, which)]
                plgpu.copy_gmem_to_smem(unit, to.at[stage, slots], arrived.at[stage])

    lax.fori_loop(0, warpgroup.number(NUM_PIECES), fetch, None)


def _consume(warpgroup: Warpgroup) -> None:
    """Attends one half of the tile's rows to its pieces, first to those that need a mask."""
    refs, config, number = warpgroup.refs, warpgroup.config, warpgroup.number
    plgpu.set_max_registers(config.consumer_registers, action="increase")
    warpgroup.fetch_queries(refs.q_g.at[warpgroup.half()])

    @pl.when(number(NUM_PIECES) > 0)
    def _():
        plgpu.barrier_wait(refs.v_bar.at[0])

    pl.when((number(NUM_PIECES) > 0) & (number(DIRTY) != 0))(lambda: _silence(warpgroup))
    if config.take_turns:
        pl.when(warpgroup.group == 1)(warpgroup.rendezvous)
    state = State(
        (jnp.zeros((ROWS, config.columns), jnp.float32),) * (config.head_dim // config.columns),
        jnp.full((ROWS,), -jnp.inf, jnp.float32),
        jnp.zeros((ROWS,), jnp.float32),
        jnp.zeros((ROWS,), jnp.float32) if config.in_units else None,
    )
    num_visits = number(NUM_MASKED)
    if config.num_sink_queries:
        num_visits += (number(NUM_MASKED) - number(FIRST_REPOSITIONED)) * config.num_sink_queries
    masked = functools.partial(attend_masked, warpgroup)
    state = lax.fori_loop(0, num_visits * config.num_parts, masked, state)
    state = attend_unmasked(warpgroup, state)
    if config.take_turns:
        pl.when(warpgroup.group == 0)(warpgroup.rendezvous)
    _store(warpgroup, *state)


def _silence(warpgroup: Warpgroup) -> None:
    """Zeroes values in unwritten slots of the first piece: a weight of 0 does not silence a NaN."""
    refs, config = warpgroup.refs, warpgroup.config
    for part in range(config.piece // ROWS):  # each consumer sees to 64 slots

        @pl.when(warpgroup.group == part)
        def _(part=part):
            slots = pl.ds(part * ROWS, ROWS)
            v = refs.v_s[0, slots]
            kv_pos = lax.broadcast_in_dim(warpgroup.key_positions(0, part, ROWS), v.shape, [0])
            refs.v_s[0, slots] = jnp.where(kv_pos <= warpgroup.number(NEWEST), v, jnp.zeros_like(v))

    plgpu.commit_smem()
    warpgroup.rendezvous()


def _store(warpgroup: Warpgroup, acc, top, total, largest) -> None:
    """Stores the result, normalised, and its log-sum-exp, both with the learned sink."""
    refs, config, group, split = warpgroup.refs, warpgroup.config, warpgroup.group, warpgroup.split
    sink = None if refs.sinks_g is None else load(refs.sinks_g, warpgroup.head)
    if sink is not None and config.splits > 1:  # one of the splits has it
        sink = lax.cond(warpgroup.number(SPLIT) == 0, lambda x: x, lambda x: jnp.full_like(x, -jnp.inf), sink)
    scale, refs.lse_s[group] = finished(top, total, sink)
    if largest is not None:
        scale *= jnp.exp2(largest)
    scale = lax.broadcast_in_dim(scale, acc[0].shape, [0])
    width = config.columns
    for i in range(0, config.head_dim, config.staged):
        part = (acc[i // width] * scale)[:, i % width : i % width + config.staged]
        refs.out_s[group] = part.astype(config.out_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.out_s.at[group], refs.out_g.at[split(), :, pl.ds(i, config.staged)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.copy_smem_to_gmem(refs.lse_s.at[group], refs.lse_g.at[split()])
    plgpu.wait_smem_to_gmem(0)
