"""Kernels of `pallas_kernels` behind the engine's contract: steps taken apart into singles, tiles and shared blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.kv.cache import KVCache
from ksana_jax.kv.patterns import SINK_POSITIONS, PatternArrays
from ksana_jax.models.rope import Rope
from ksana_jax.ops.attention import CEILING
from ksana_jax.step import StepArrays, StepShape
from pallas_kernels import hopper, triton_decode, triton_ragged
from pallas_kernels.patterns import Pattern

if TYPE_CHECKING:
    from ksana_jax.ops.implementations import Needs

# The kernels' `sink_moved` counts in the same order.
assert SINK_POSITIONS == ("absolute", "cache", "ceiling")


class Kernels(NamedTuple):
    """Kernels that together serve a step.

    decode, ragged: for tiles of one query and of more, `pallas_kernels.reference.ragged_paged_attention`'s signature.
    plan_work: what layers with one pattern share of such a call, given as `work`; None where there is nothing.
    """

    decode: Callable[..., Any]
    ragged: Callable[..., Any]
    plan_work: Callable[..., Any] | None = None

    def plan(self, batch: StepArrays, shape: StepShape, pattern: PatternArrays, cache: KVCache, num_heads: int):
        """What layers with one pattern share in a step: one for each call of a kernel."""
        assert self.plan_work is not None
        seen = kernel_pattern(pattern)
        return tuple(
            self.plan_work(*call.arrays, cache.blocks, seen, num_query_heads=num_heads) for call in calls(batch, shape)
        )

    def attend(
        self,
        q: jax.Array,
        q_unrotated: jax.Array,
        cache: KVCache,
        layer: int,
        batch: StepArrays,
        shape: StepShape,
        pattern: PatternArrays,
        rope: Rope,
        num_rotated_sinks: int,
        plan: tuple[Any, ...] | None,
    ) -> jax.Array:
        """Keeps the contract of `attention.ragged_paged_attention`, on pools in bfloat16 and float16."""
        q_sink = None
        if num_rotated_sinks:
            q_sink = second_queries(q_unrotated, batch.positions, pattern, rope, num_rotated_sinks)
        found = []
        for i, call in enumerate(calls(batch, shape)):
            kernel = self.decode if call.tile == 1 else self.ragged
            work = {} if plan is None else {"work": plan[i]}
            second = None if q_sink is None or call.shared else call.take(q_sink, 0)
            out, lse = kernel(
                call.take(q, 0), cache.blocks, *call.arrays, layer=jnp.int32(layer), pattern=kernel_pattern(pattern),
                q_sink=second, return_lse=True, out_dtype=jnp.float32, **work,
            )  # fmt: skip
            found.append((call.give(out), call.give(lse)))
        if shape.shared_rows:
            found[0] = merge(found[0], found.pop())
        parts = [out for out, _ in found]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


class Call(NamedTuple):
    """One call of a kernel: tiles of `tile` tokens, of the step's tokens start..start+count.

    arrays: tables and starts [S, P], positions [S, tile]. shared: over blocks that the singles of a tile share.
    """

    start: int
    count: int
    tile: int
    arrays: tuple[jax.Array, jax.Array, jax.Array]
    shared: bool = False

    def take(self, x: jax.Array, fill) -> jax.Array:
        """The tokens of x [T, ...] as tiles [S, tile, ...]."""
        x = x[self.start : self.start + self.count]
        pad = ((0, -self.count % self.tile), *((0, 0),) * (x.ndim - 1))
        return jnp.pad(x, pad, constant_values=fill).reshape(-1, self.tile, *x.shape[1:])

    def give(self, x: jax.Array) -> jax.Array:
        """Tiles [S, tile, ...] as tokens [count, ...]."""
        return x.reshape(-1, *x.shape[2:])[: self.count]


def calls(batch: StepArrays, shape: StepShape) -> list[Call]:
    """The calls that make up a step: singles, tiles, then singles over what groups of them share."""
    d, made = shape.num_singles, []

    def add(start: int, count: int, tile: int, tables, starts, shared: bool = False) -> None:
        bare = Call(start, count, tile, (tables, starts, tables), shared)
        made.append(bare._replace(arrays=(tables, starts, bare.take(batch.positions, -1))))

    if d:
        add(0, d, 1, batch.block_tables[:d], batch.block_starts[:d])
    if shape.num_tiles:
        count = shape.num_tiles * shape.query_tile
        add(d, count, shape.query_tile, batch.block_tables[d:], batch.block_starts[d:])
    if shape.shared_rows:
        add(0, d, shape.shared_rows, batch.shared_tables, batch.shared_starts, shared=True)
    return made


def kernel_pattern(pattern: PatternArrays) -> Pattern:
    """A layer's numbers as the kernels name them."""
    return Pattern(
        window=pattern.window, num_sinks=pattern.num_sinks, stride=pattern.stride, has_global=pattern.has_global,
        global_every=pattern.global_every, sink_moved=pattern.sink_position, sink_ceiling=pattern.sink_ceiling,
    )  # fmt: skip


def second_queries(q, positions, pattern: PatternArrays, rope: Rope, count: int) -> jax.Array:
    """Queries [T, count, N, H] for sinks that are seen from elsewhere, from unrotated q [T, N, H].

    StreamingLLM's are all the same; LM-Infinite's stand at `sink_ceiling` from each sink: query j is for the sink at j,
    whose key stays rotated where it is.
    """
    in_cache = jnp.minimum(positions, pattern.num_sinks + pattern.window - 1)[:, None]
    at_ceiling = pattern.sink_ceiling + jnp.arange(count)
    where = jnp.where(pattern.sink_position == CEILING, at_ceiling, in_cache)
    return rope.rotate(jnp.broadcast_to(q[:, None], (q.shape[0], count, *q.shape[1:])), rope.angles(where))


def merge(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Attention (out [T, N, H], log-sum-exp [T, N]) of the same queries to the keys of both."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = jnp.logaddexp(lse_a, lse_b)
    base = jnp.where(jnp.isfinite(lse), lse, 0.0)
    return jnp.exp(lse_a - base)[..., None] * out_a + jnp.exp(lse_b - base)[..., None] * out_b, lse


def lacks(kernels: Kernels, needs: Needs) -> str | None:
    """What kernels lack of some needs, in their own words, or None."""

    def array(*dims: int, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(dims, dtype)

    heads = (needs.num_heads, needs.head_dim)
    pool = array(2, 1, 2, needs.num_kv_heads, needs.block_size, needs.head_dim, dtype=needs.dtype)
    for kernel, tile in ((kernels.decode, 1), (kernels.ragged, 32)):
        q_sink = array(1, tile, needs.num_rotated_sinks, *heads, dtype=needs.dtype) if needs.num_rotated_sinks else None
        try:
            jax.eval_shape(
                lambda *args, kernel=kernel, q_sink=q_sink: kernel(*args, layer=0, q_sink=q_sink),
                array(1, tile, *heads, dtype=needs.dtype), pool, array(1, 1), array(1, 1), array(1, tile),
            )  # fmt: skip
        except NotImplementedError as error:
            return str(error)
    return None


HOPPER = Kernels(hopper.ragged_paged_attention, hopper.ragged_paged_attention, hopper.plan_work)
TRITON = Kernels(triton_decode.ragged_paged_attention, triton_ragged.ragged_paged_attention)
