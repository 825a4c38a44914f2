"""Runs the kernels of `pallas_kernels` on the engine's steps, split into decodes, tiles and shared blocks."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.core.patterns import SINK_POSITIONS, PatternArrays
from ksana_jax.ops import code_levels
from ksana_jax.ops.attention import Attended, PartialAttention, merge, normalised
from ksana_jax.ops.context import AttentionContext
from ksana_jax.ops.kv_write import Queries, sink_query_position, write
from ksana_jax.ops.pool import KVCache
from ksana_jax.scheduler.step.types import StepArrays, StepShape
from pallas_kernels import contract
from pallas_kernels.contract import Kernel, Result, Written
from pallas_kernels.patterns import Pattern

PREFILL_ROWS = 128  # of the tiles of Hopper's prefill

# Codecs whose leaves are a `contract.Pool`: numbers, codes with scales, or of latents codes next to numbers.
FLOATS, CODES, LATENTS = ("f32", "bf16", "f16"), ("int8", "fp8_e4m3"), ("latent8",)
UNPACKED = (*FLOATS, *CODES, *LATENTS)

assert SINK_POSITIONS == ("absolute", "cache", "ceiling")  # the kernels' `Pattern` counts in this order


class Kernels(NamedTuple):
    """The kernels that together serve a step.

    decode, ragged: for tiles of one query and of more. kv_write: of keys and values; None writes with XLA.
    prefill: for tiles of PREFILL_ROWS and more rows, queries x query heads of a group, where it takes them.
    latents: for all tiles of a pool of latents; None where the others read one, or none does.
    """

    decode: Kernel[Result]
    ragged: Kernel[Result]
    prefill: Kernel[Result] | None = None
    kv_write: Kernel[Written] | None = None
    latents: Kernel[Result] | None = None

    def serving(self, call: Call, asked: contract.Call) -> Kernel[Result]:
        """Returns the kernel for one call."""
        if self.latents is not None and asked.pool.kv.shape[2] == 1:
            return self.latents
        if call.tile == 1:
            return self.decode
        # Shared blocks give few tiles over many keys: only the ragged kernel splits them among all workers.
        if self.prefill is None or call.tile * asked.group < PREFILL_ROWS:
            return self.ragged
        return self.ragged if self.prefill.unsupported(asked) else self.prefill

    def schedule(self, context: AttentionContext, cache: KVCache, num_heads: int) -> tuple[Any, ...]:
        """Computes the work lists of a step, one per kernel call, which layers with one pattern share."""
        pattern, found = kernel_pattern(context.pattern), []
        for call in calls(context.batch, context.shape):
            rotated = cache.leaves["rotated"].shape[-1] if cache.codec in LATENTS else 0
            tiles, shape = (len(call.arrays[0]), call.tile), (num_heads, cache.kv.shape[-1] + rotated)
            # Only the queries' shapes are read; kernels that take codes have queries in 16 bits.
            dtype = jnp.bfloat16 if cache.codec in (*CODES, *LATENTS) else cache.kv.dtype
            q = jax.ShapeDtypeStruct((*tiles, *shape), dtype)
            q_sink = jax.ShapeDtypeStruct((*tiles, context.num_repositioned_sinks, *shape), dtype)
            asked = _ask(call, context, pattern, cache, q, q_sink if context.num_repositioned_sinks else None)
            found.append(self.serving(call, asked).work(asked))
        return tuple(found)

    def write(
        self, q, k, v, cache: KVCache, context: AttentionContext, angles, scale: float
    ) -> tuple[Queries, KVCache]:
        """Does `attention.write`; also returns sink queries [T, J, N, H], one per repositioned sink."""
        rope, sink_angles = context.rope, None
        if context.num_repositioned_sinks:
            sinks = jnp.arange(context.num_repositioned_sinks)
            sink_angles = rope.angles(sink_query_position(context.pattern, context.batch.positions[:, None], sinks))
        unrotated = context.observer is not None and context.observer.unrotated_keys
        if self.kv_write is None or k is None or unrotated or cache.kv.shape[2] == 1:
            queries, cache = write(q, k, v, cache, context._replace(num_repositioned_sinks=0), angles, scale)
            if sink_angles is not None:
                shape = (q.shape[0], context.num_repositioned_sinks, *q.shape[1:])
                again = jnp.broadcast_to((q * scale)[:, None], shape)
                queries = queries._replace(q_sink=rope.rotate(again, sink_angles))
            return queries, cache

        def scaled(angles):
            return angles[0] * rope.scale, angles[1] * rope.scale

        call = contract.Write(
            q,
            k,
            v,
            pool_of(cache),
            context.batch.slots,
            scaled(angles),
            jnp.int32(context.layer),
            sink_rope=None if sink_angles is None else scaled(sink_angles),
            q_scale=scale,
        )
        written = self.kv_write(call)
        return Queries(written.q, written.q_sink), _with_pool(cache, written.pool)

    def attend(
        self, queries: Queries, cache: KVCache, context: AttentionContext, work: tuple[Any, ...] | None
    ) -> Attended:
        """Does `attention.ragged_paged_attention` on pools of numbers or codes; the result has the queries' dtype."""
        pattern, found, masses, dtype = kernel_pattern(context.pattern), [], [], queries.q.dtype
        rotation = None if cache.codec in UNPACKED else code_levels.rotation(cache.codec)
        if rotation is not None:
            queries = jax.tree.map(lambda x: rotation.transform(x, jnp), queries)
        for i, call in enumerate(calls(context.batch, context.shape)):
            q, q_sink = (None if x is None else call.take(x, 0) for x in queries)
            asked = _ask(call, context, pattern, cache, q, q_sink)
            with jax.named_scope("shared") if call.shared else contextlib.nullcontext():
                result = self.serving(call, asked)(asked, None if work is None else work[i])
            if result.mass is not None:
                # The kernel of the mass reads the pool after the attention. Without this, nothing says that it does so
                # before the next layer writes to the pool, and XLA copies the pool.
                result = jax.lax.optimization_barrier(result)
                masses.append(result.mass)
            found.append(jax.tree.map(call.give, result._replace(mass=None)))
        if context.shape.shared_rows:
            shared = found.pop()
            found[0] = found[0]._replace(out=normalised(merge(_seen(found[0]), _seen(shared))))
        parts = [result.out for result in found]
        out = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return Attended((out if rotation is None else rotation.inverse(out, jnp)).astype(dtype), tuple(masses))


class Call(NamedTuple):
    """One call of a kernel: tiles of `tile` tokens, of the step's tokens start..start+count.

    arrays: tables and starts [S, P], positions [S, tile]. shared: over blocks that the decodes of a tile share.
    """

    start: int
    count: int
    tile: int
    arrays: tuple[jax.Array, jax.Array, jax.Array]
    shared: bool = False

    def take(self, x: jax.Array, fill) -> jax.Array:
        """Reshapes tokens of x [T, ...] to tiles [S, tile, ...]."""
        x = x[self.start : self.start + self.count]
        pad = ((0, -self.count % self.tile), *((0, 0),) * (x.ndim - 1))
        return jnp.pad(x, pad, constant_values=fill).reshape(-1, self.tile, *x.shape[1:])

    def give(self, x: jax.Array) -> jax.Array:
        """Reshapes tiles [S, tile, ...] to tokens [count, ...]."""
        return x.reshape(-1, *x.shape[2:])[: self.count]


def calls(batch: StepArrays, shape: StepShape) -> list[Call]:
    """Returns the kernel calls of a step: its parts, then the first part over the blocks that groups share."""
    made = []

    def add(start: int, count: int, tile: int, tables, starts, shared: bool = False) -> None:
        bare = Call(start, count, tile, (tables, starts, tables), shared)
        made.append(bare._replace(arrays=(tables, starts, bare.take(batch.cache_positions, -1))))

    for part, tokens, tiles in shape.places():
        add(tokens.start, part.count * part.width, part.width, batch.block_tables[tiles], batch.block_starts[tiles])
    if shape.shared_rows:
        add(0, shape.parts[0].count, shape.shared_rows, batch.shared_tables, batch.shared_starts, shared=True)
    return made


def _ask(call: Call, context: AttentionContext, pattern: Pattern, cache: KVCache, q, q_sink) -> contract.Call:
    """Converts a call to the kernels' contract. Shared blocks have neither repositioned nor learned sinks."""
    merges, observer, numbers = context.shape.shared_rows > 0, context.observer, context.batch.query_numbers
    method = None if observer is None else observer.method
    tables, starts, positions = call.arrays
    key_rope = None if observer is None else observer.key_rope(context.rope, tables.shape[1] * cache.block_size)
    options = contract.Options(
        q_sink=None if call.shared or key_rope else q_sink,  # where keys are unrotated, no pattern has sinks
        sinks=None if call.shared else context.sink_logits,
        soft_cap=context.soft_cap,
        return_lse=merges,
        return_mass=observer is not None and observer.observes,
        mass_factor=None if method is None or numbers is None else method.query_factor(call.take(numbers, 0)),
        key_rope=key_rope,
        out_dtype=jnp.float32 if merges else q.dtype,
    )
    return contract.Call(q, pool_of(cache), tables, starts, positions, jnp.int32(context.layer), pattern, options)


def pool_of(cache: KVCache) -> contract.Pool:
    """Converts a pool to the kernels' contract."""
    levels = None if cache.codec in UNPACKED else code_levels.levels(cache.codec)
    return contract.Pool(
        cache.kv, cache.leaves.get("scale"), cache.leaves.get("zero"), levels, cache.leaves.get("rotated")
    )


def _with_pool(cache: KVCache, pool: contract.Pool) -> KVCache:
    scales = {} if pool.scales is None else {"scale": pool.scales}
    return cache.with_leaves(cache.leaves | {"kv": pool.kv} | scales)


def kernel_pattern(pattern: PatternArrays) -> Pattern:
    """Returns a layer's pattern for the kernels; fields have the names of `PatternArrays`.

    Raises:
      NotImplementedError: a pattern has fields that the kernels do not read.
    """
    if reason := unread_fields(pattern._fields):
        raise NotImplementedError(reason)
    return Pattern(**{name: getattr(pattern, name) for name in Pattern._fields})


def unread_fields(pattern_fields: tuple[str, ...]) -> str | None:
    """Returns why kernels cannot serve patterns with some fields, or None; independent of the fields' values."""
    unread = [name for name in pattern_fields if name not in Pattern._fields]
    return f"attention patterns have {', '.join(unread)}, which the kernels do not read" if unread else None


def _seen(result: contract.Result) -> PartialAttention:
    """Returns a kernel's result as a partial result for merging, weighted by its log-sum-exp."""
    assert result.lse is not None
    return PartialAttention(result.lse, jnp.isfinite(result.lse).astype(jnp.float32), result.out)
