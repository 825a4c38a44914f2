"""Writes a step's keys and values to the paged pool, for Hopper, in Mosaic GPU: norm, rope, quantise, scatter in place.

Bound by memory: every number is read once and written once. A block of threads is one warpgroup with one token (or a
few), which it holds in registers; it needs no shared memory and no barriers, so that many blocks on a multiprocessor
hide each other's waits: 8 of them with 32 query and 8 kv heads of 128 (64 registers a thread, compiled for an H200 with
jax 0.10.2 to 0.12; not yet timed on one). The halves of a head are two matrices [heads, H / 2], because rope pairs
element i with i + H / 2; a row is within one warp, which makes the norm and the largest magnitude of a head a few
shuffles. See `row_layouts`.

The pool is a `jax.Ref`: a kernel of Mosaic aliases those in and out. If the caller donates the array, nothing of the
pool's size is allocated or copied.

Source: RMS norm, arXiv:1910.07467; rope, arXiv:2104.09864.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import Kernel, Pool, Write, Written
from pallas_kernels.hopper import interpreter
from pallas_kernels.kv_write_reference import LARGEST, SMALLEST, check

HEAD_DIMS = (64, 96, 128, 256)
POOL_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.float8_e4m3fn)
MAX_HELD = 256  # numbers of a token in a thread, in 16 bits; 384 spill (128 heads of 128 and as many of keys, jax 0.12)
JAX_0_10 = jax.__version_info__ < (0, 11)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the kernel runs.

    tokens_per_block: maximum tokens that a block of threads writes; the largest divisor of T that divides it is taken.
    interpret: True runs the kernel on the CPU, in jax's interpreter of GPU programs; or that interpreter's parameters.
    """

    tokens_per_block: int = 1
    interpret: Any = False


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration that a kernel is compiled for.

    heads: query heads, kv heads, head dim. tokens: written by a block of threads.
    plain_loads: as the interpreter of jax 0.10 requires.
    """

    heads: tuple[int, int, int]
    num_slots: int
    block_size: int
    tokens: int
    q_scale: float
    eps: float
    plain_loads: bool


def row_layouts(num_heads: int, num_kv_heads: int, width: int):
    """How a warpgroup holds matrices [num_heads, width] and [num_kv_heads, width] in registers.

    A row is within one warp, and a thread holds up to eight of its neighbours (16 bytes in bfloat16), fewer where
    that keeps all threads at work: 8 x 64 is 8 rows at a time, 2 to a warp, each of 16 threads with 4 numbers. Too few
    or odd rows are held, read and written by several threads alike. Both spread one row alike: angles serve both.
    """
    tile = math.gcd(width, 256)
    few, many = (math.gcd(n, 128) for n in (num_kv_heads, num_heads))
    fitting = [v for v in (8, 4, 2, 1) if v <= tile <= 32 * v]
    vector = next((v for v in fitting if few * tile >= 128 * v), fitting[-1])
    per_warp = 32 * vector // tile
    warps = [min(max(rows // per_warp, 1), 4) for rows in (many, few)]
    if warps[0] != warps[1]:
        warps = [4 if w == 4 else 1 for w in warps]  # of rows over 2 warps Mosaic says that they are spread otherwise
    return tuple(_row_layout(min(per_warp, rows), w, tile, vector) for rows, w in zip((many, few), warps))


def _row_layout(per_warp: int, warps: int, tile: int, vector: int):
    """per_warp rows in each of `warps` warps, `vector` numbers a thread, in pieces of `tile` columns."""
    lane_copies, warp_copies = 32 * vector // (tile * per_warp), 4 // warps
    tiles = [(warps * per_warp, tile), (per_warp, tile), (vector,)]
    if warps == 1 or per_warp == 1:
        del tiles[1]  # Mosaic wants each layout in its shortest form
    warp_dims = ((-5 if per_warp > 1 else -3),) * (warps > 1) + (plgpu.Replicated(warp_copies),) * (warp_copies > 1)
    lane_dims = (plgpu.Replicated(lane_copies),) * (lane_copies > 1) + (-3,) * (per_warp > 1) + (-2,)
    return plgpu.Layout.TILED(plgpu.Tiling(tuple(tiles)), warp_dims, lane_dims, -1)


def _rows(x: jax.Array, shape) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [0])


def _columns(x: jax.Array, shape) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [1])


def _get(ref, *index, layout, plain: bool) -> jax.Array:
    if plain:
        return ref[index]
    # Loads that Mosaic considers slow, such as of odd numbers of heads, must be allowed one by one.
    load: Any = plgpu.load  # takes the index apart on jax 0.10, and not on 0.12
    x = load(ref, index, optimized=False) if JAX_0_10 else load(ref.at[index], optimized=False)
    return plgpu.layout_cast(x, layout)


def _put(ref, *index, value) -> None:
    store: Any = getattr(plgpu, "store", None)
    if store is None:
        ref[index] = value
    else:  # jax 0.12, where plain stores must have the layout that Mosaic prefers
        store(ref.at[index], value, optimized=False)


def _halved(x: Any, heads: int = -2) -> Any:
    """Returns an array, or its shape, as [..., 2, 1, H / 2] if it has one head, on axis `heads`.

    Half of one head is then contiguous. Mosaic on jax 0.10 cannot load [1, H / 2] in rows of H.
    """
    if x.shape[heads] != 1:
        return x
    shape = [size for axis, size in enumerate(x.shape) if axis != heads % x.ndim]
    shape = (*shape[:-1], 2, 1, shape[-1] // 2)
    return jax.ShapeDtypeStruct(shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.reshape(shape)


def _of_heads(ref, index) -> tuple[Any, ...]:
    """The indices of both halves of all heads; index: with a slice(None) for heads. See `_halved`."""
    if ref.ndim == len(index) + 1:
        half = ref.shape[-1] // 2
        return tuple((*index, pl.ds(i * half, half)) for i in (0, 1))
    index = [x for x in index if not isinstance(x, slice)]
    return tuple((*index, i) for i in (0, 1))


def _load(ref, *index, layout, plain: bool) -> tuple[jax.Array, jax.Array]:
    """The two halves of the last dimension, in float32."""
    a, b = (_get(ref, *half, layout=layout, plain=plain) for half in _of_heads(ref, index))
    return a.astype(jnp.float32), b.astype(jnp.float32)


def _load_heads(g, token, first: int, count: int, *, layout, plain: bool) -> tuple[jax.Array, jax.Array]:
    """Heads first .. first + count of a token's queries, keys and values, as `_load` gives them."""
    if count > 1:
        return _load(g["qkv"], token, pl.ds(first, count), layout=layout, plain=plain)
    a, b = (_get(g["qkv_halves"], token, first, i, layout=layout, plain=plain) for i in (0, 1))
    return a.astype(jnp.float32), b.astype(jnp.float32)


def _store(ref, *index, halves) -> None:
    for half, x in zip(_of_heads(ref, index), halves):
        _put(ref, *half, value=x.astype(ref.dtype))


def _normed(halves, weight, eps: float):
    if weight is None:
        return halves
    a, b = halves
    total = (a * a + b * b).sum(axis=1)
    factor = _rows(lax.rsqrt(total * (0.5 / a.shape[1]) + eps), a.shape)
    return tuple(x * factor * _columns(w, x.shape) for x, w in zip(halves, weight))


def _rotated(halves, cos, sin):
    a, b = halves
    cos, sin = _columns(cos, a.shape), _columns(sin, a.shape)
    return a * cos - b * sin, b * cos + a * sin


def _quantised(halves, dtype):
    """Symmetric codes with one scale per row: its largest magnitude over the largest code. Tiny rows become zeros."""
    a, b = halves
    top = jnp.maximum(jnp.abs(a), jnp.abs(b)).max(axis=1)
    largest = LARGEST[jnp.dtype(dtype)]
    inverse = _rows(jnp.where(top < SMALLEST, 0.0, largest / top), a.shape)
    codes = tuple(x * inverse for x in halves)
    if dtype == jnp.int8:
        codes = tuple(lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN) for x in codes)
    return tuple(x.astype(dtype) for x in codes), top * (1 / largest)


def _write_tokens(*refs, names: tuple[str, ...], config: Config):
    """The kernel. names: of the refs; optional ones may be absent."""
    g = dict(zip(names, refs))
    num_heads, num_kv_heads, head_dim = config.heads
    q_layout, kv_layout = row_layouts(num_heads, num_kv_heads, head_dim // 2)
    column = kv_layout.reduce(0)
    layer, plain = g["layer"][0], config.plain_loads
    first = lax.axis_index("block") * config.tokens

    # All loads come before all stores: loads do not move ahead of stores that could touch them.
    loaded = []
    for token in (first + i for i in range(config.tokens)):
        q = _load_heads(g, token, 0, num_heads, layout=q_layout, plain=plain)
        k, v = (
            _load_heads(g, token, first_head, num_kv_heads, layout=kv_layout, plain=plain)
            for first_head in (num_heads, num_heads + num_kv_heads)
        )
        cos, sin = (_get(g[x], token, layout=column, plain=plain) for x in ("rope_cos", "rope_sin"))
        loaded.append((token, g["slots"][token], q, k, v, cos, sin))
    weights = {x: _load(g[x], layout=column, plain=plain) for x in ("q_norm", "k_norm") if x in g}

    for token, slot, q, k, v, cos, sin in loaded:
        q = _normed(q, weights.get("q_norm"), config.eps)
        q = tuple(x * config.q_scale for x in q)
        _store(g["q_out"], token, slice(None), halves=_rotated(q, cos, sin))
        if "sink_cos" in g:
            for j in range(g["sink_cos"].shape[1]):
                sink = (_get(g[x], token, j, layout=column, plain=plain) for x in ("sink_cos", "sink_sin"))
                _store(g["q_sink"], token, j, slice(None), halves=_rotated(q, *sink))

        @pl.when((slot >= 0) & (slot < config.num_slots))
        def _(slot=slot, k=k, v=v, cos=cos, sin=sin):
            block, offset = (f(slot, jnp.int32(config.block_size)) for f in (lax.div, lax.rem))
            k = _rotated(_normed(k, weights.get("k_norm"), config.eps), cos, sin)
            for which, halves in enumerate((k, v)):
                if "scales" in g:
                    halves, scale = _quantised(halves, g["pool"].dtype)
                    _put(g["scales"], block, layer, which, slice(None), offset, value=scale)
                _store(g["pool"], block, layer, which, slice(None), offset, halves=halves)


def _check_supported(call: Write) -> None:
    num_heads, head_dim = call.q.shape[1:]
    num_kv_heads, dtype = call.k.shape[1], call.pool.kv.dtype
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}")
    if dtype not in POOL_DTYPES:
        raise NotImplementedError(f"pool of {dtype} is not of {', '.join(str(jnp.dtype(d)) for d in POOL_DTYPES)}")
    held = 0
    for rows, layout in zip((num_heads, 2 * num_kv_heads), row_layouts(num_heads, num_kv_heads, head_dim // 2)):
        tiles = layout.args[0].tiles
        held += rows * head_dim // (math.prod(tiles[0]) // tiles[-1][0])
    if held > MAX_HELD:
        raise NotImplementedError(
            f"{num_heads} query and {num_kv_heads} kv heads of {head_dim}: a thread would hold {held} numbers of a "
            f"token, more than {MAX_HELD} do not fit its registers"
        )


def _inputs(call: Write) -> dict[str, jax.Array]:
    """Inputs that the kernel only reads, by name; optional ones may be absent."""
    # XLA drops this where they are slices of one product.
    qkv = jnp.concatenate([call.q, call.k, call.v], axis=1)
    found = {"qkv": qkv, "slots": call.slots}
    if 1 in (call.q.shape[1], call.k.shape[1]):
        found["qkv_halves"] = qkv.reshape(*qkv.shape[:2], 2, 1, qkv.shape[2] // 2)
    found |= {
        "layer": jnp.asarray(call.layer, jnp.int32).reshape(1),
        "rope_cos": call.rope[0],
        "rope_sin": call.rope[1],
    }
    if call.q_norm is not None:
        found["q_norm"] = call.q_norm
    if call.k_norm is not None:
        found["k_norm"] = call.k_norm
    if call.sink_rope is not None:
        found |= {"sink_cos": call.sink_rope[0], "sink_sin": call.sink_rope[1]}
    return found


def _outputs(call: Write) -> dict[str, jax.ShapeDtypeStruct]:
    """Outputs of the kernel, by name."""
    found = {"q_out": jax.ShapeDtypeStruct(call.q.shape, call.q.dtype)}
    if call.sink_rope is not None:
        num_tokens, *heads = call.q.shape
        found["q_sink"] = jax.ShapeDtypeStruct((num_tokens, call.sink_rope[0].shape[1], *heads), call.q.dtype)
    return found


# A separate jit, so that all layers of a model share one lowering.
@functools.partial(jax.jit, static_argnames="tuning")
def write(call: Write, work: None = None, *, tuning: Tuning) -> Written:
    """Writes this step's keys and values to the pool, in place; `pallas_kernels.contract` has the arguments.

    To be called under jax.jit, with the pool donated.

    Raises:
      NotImplementedError: another head dim or type of pool, more heads than registers hold.
    """
    check(call)
    _check_supported(call)
    num_tokens, inputs, outputs = len(call.slots), _inputs(call), _outputs(call)
    if num_tokens == 0:
        empty = {name: jnp.zeros(out.shape, out.dtype) for name, out in outputs.items()}
        return Written(empty["q_out"], call.pool, empty.get("q_sink"))

    kv, scales, *_ = call.pool
    updated = {"pool": _halved(kv, heads=3)} | ({} if scales is None else {"scales": scales})
    refs = {name: jax.new_ref(x, memory_space=plgpu.GMEM) for name, x in updated.items()}
    config = Config(
        heads=(call.q.shape[1], *kv.shape[3::2]),
        num_slots=kv.shape[0] * kv.shape[4],
        block_size=kv.shape[4],
        tokens=math.gcd(num_tokens, tuning.tokens_per_block),
        q_scale=call.q_scale,
        eps=call.eps,
        plain_loads=JAX_0_10 and bool(tuning.interpret),
    )
    # pl.kernel, not plgpu.kernel: the latter's rule for vmap does not let refs through on jax 0.10.
    kernel: Any = pl.kernel(
        functools.partial(_write_tokens, names=(*inputs, *refs, *outputs), config=config),
        out_type=tuple(map(_halved, outputs.values())),
        mesh=plgpu.Mesh(grid=(num_tokens // config.tokens,), grid_names=("block",), kernel_name="kv_write"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,  # safe here: threads exchange nothing but shuffles within a warp
        ),
        interpret=interpreter.parameters(tuning.interpret),
        name="kv_write",
    )
    written = kernel(*inputs.values(), *refs.values())
    results = {name: x.reshape(outputs[name].shape) for name, x in zip(outputs, written)}
    after = {name: jax.freeze(ref) for name, ref in refs.items()}
    return Written(results["q_out"], Pool(after["pool"].reshape(kv.shape), after.get("scales")), results.get("q_sink"))


KERNEL = Kernel(write, Tuning())
