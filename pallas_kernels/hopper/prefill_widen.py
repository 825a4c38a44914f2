"""The producer of the prefill kernel for keys and values in 8 or 4 bits: copies codes, and widens them for the others.

Its warpgroup has the registers that the consumers can spare. Codes arrive in one buffer for keys and one for values,
and become 16 bits in the buffers that wgmma reads: exactly, see `quantised`. The consumers never see codes:

    8 bits    they multiply scores and weights by the scales of their columns, which are here without gaps: scales
              of keys times the factor to base 2, scales of values as 0 in unwritten slots
    4 bits    nothing remains to be done
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import quantised as narrow
from pallas_kernels.hopper.common import LOG2E, ROWS, int32
from pallas_kernels.hopper.prefill_warpgroup import Config, Warpgroup
from pallas_kernels.hopper.prefill_work import DIRTY, NEWEST, NUM_PIECES
from pallas_kernels.work import TILE_KV

KEYS, VALUES = 0, 1
# Scales of values are never taken to be smaller: their logarithm is needed.
SMALLEST = 1e-20


def produce(warpgroup: Warpgroup) -> None:
    """Copies and widens all pieces, `stages` ahead of the consumers.

    Keys come one piece before values, as the consumers read them: the buffer of a piece's values is free half a turn
    after the next one's keys.
    """
    plgpu.set_max_registers(warpgroup.config.producer_registers, action="decrease")
    end, first = warpgroup.number(NUM_PIECES), warpgroup.first_unit()
    widen = functools.partial(_widen, warpgroup, first, end)

    @pl.when(end > 0)
    def _():
        for which in (KEYS, VALUES):
            _fetch_scales(warpgroup, first, int32(0), which)
            _fetch_codes(warpgroup, first, int32(0), which)
        widen(int32(0), KEYS)

    def turn(i, _):
        pl.when(i + 1 < end)(lambda: widen(i + 1, KEYS))
        widen(i, VALUES)

    lax.fori_loop(0, end, turn, None)


def _fetch_codes(warpgroup: Warpgroup, first, i, which: int) -> None:
    refs, config = warpgroup.refs, warpgroup.config

    def fetch(j, _=None):
        to = refs.codes_s.at[which, pl.ds(j * config.unit, config.unit)]
        plgpu.copy_gmem_to_smem(refs.pool_g.at[warpgroup.unit_index(first, i, j, which)], to, refs.codes_bar.at[which])

    _for_units(config, first, fetch)


def _fetch_scales(warpgroup: Warpgroup, first, i, which: int) -> None:
    refs, config = warpgroup.refs, warpgroup.config
    raw = refs.raw_s.at[which]

    def fetch(j, _=None):
        to = narrow.place(raw, j, config.unit) if config.by_token else raw.at[j]
        plgpu.copy_gmem_to_smem(refs.scales_g.at[warpgroup.unit_index(first, i, j, which)], to, refs.raw_bar.at[which])

    _for_units(config, first, fetch)


def _for_units(config: Config, first, fetch) -> None:
    """Calls a function for each unit of a piece."""
    if config.units_of_piece > 2:
        # Side by side they do not fit the registers. Compilers, which would unroll the loop, do not know that
        # first >> 31 is 0.
        lax.fori_loop(0, config.units_of_piece + (first >> 31), fetch, None)
    else:
        for j in range(config.units_of_piece):
            fetch(j)


def _widen(warpgroup: Warpgroup, first, end, i, which: int) -> None:
    """Hands one piece's keys or values to the consumers, and asks for the next codes."""
    refs, config = warpgroup.refs, warpgroup.config
    to, arrived, read = ((refs.k_s, refs.k_bar, refs.k_read), (refs.v_s, refs.v_bar, refs.v_read))[which]
    stage = warpgroup.stage(i)
    pl.when(i >= config.stages)(lambda: plgpu.barrier_wait(read.at[stage]))
    if not config.by_token:
        plgpu.barrier_wait(refs.raw_bar.at[which])
    elif which == KEYS:
        _hand_over_scales(warpgroup, i)
    plgpu.barrier_wait(refs.codes_bar.at[which])
    for j in range(config.piece // TILE_KV):
        slots = pl.ds(j * TILE_KV, TILE_KV)
        x = narrow.widened(refs.codes_s[which, slots], config.dtype, not config.in_place)
        if config.by_token:
            to[stage, slots] = x
        else:
            narrow.write(to.at[stage, slots], x, refs.raw_s.at[which, j], which, 0)
    plgpu.commit_smem()
    plgpu.barrier_arrive(arrived.at[stage])

    @pl.when(i + 1 < end)
    def _():
        for kind in ((KEYS, VALUES) if which == KEYS else ()) if config.by_token else (which,):
            _fetch_scales(warpgroup, first, i + 1, kind)
        _fetch_codes(warpgroup, first, i + 1, which)


def _hand_over_scales(warpgroup: Warpgroup, i) -> None:
    """Writes the scales of a piece where consumers read them, and in float16 the logarithm of their largest."""
    refs, config = warpgroup.refs, warpgroup.config
    place = warpgroup.scales_slot(i)
    for which in (KEYS, VALUES):
        plgpu.barrier_wait(refs.raw_bar.at[which])
        x = _without_gaps(refs.raw_s.at[which], config.piece, config.unit)
        if which == KEYS:
            x *= LOG2E if config.soft_cap is None else 1 / config.soft_cap
        refs.scales_s[place, which] = x

    @pl.when((i == 0) & (warpgroup.number(DIRTY) != 0))
    def _():
        x = refs.scales_s[place, VALUES]
        written = warpgroup.key_positions(i, 0, config.piece) <= warpgroup.number(NEWEST)
        refs.scales_s[place, VALUES] = jnp.where(written, x, jnp.zeros_like(x))

    if config.in_units:
        plgpu.commit_smem()
        x = lax.broadcast_in_dim(refs.scales_s[place, VALUES], (ROWS, config.piece), [1])
        if config.in_place:  # jax's interpreter has no layouts
            x = plgpu.layout_cast(x, plgpu.Layout.WGMMA)
        refs.largest_s[place] = jnp.log2(jnp.maximum(x.max(axis=1), SMALLEST))


def _without_gaps(ref, columns: int, size: int) -> jax.Array:
    """Scales [columns] of units of `size` tokens, from where `quantised.place` has them."""
    gap = ref.shape[0] * size // columns - size
    found = ref[pl.ds(0, columns)]
    for i in range(1, columns // size if gap else 1):
        # Unit i begins i * gap further than in an array without gaps.
        slot = lax.broadcasted_iota(jnp.int32, found.shape, 0)
        found = jnp.where(slot >= i * size, ref[pl.ds(i * gap, columns)], found)
    return found
