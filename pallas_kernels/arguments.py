"""Arguments for attention kernels: one list of specs that tests, compile checks and benchmarks share.

Data are random for each seed, and adversarial: block ids are shuffled, tables continue with valid ids of blocks of
NaN, and unused slots of a row's last block, and blocks that the pattern hides, hold NaN as well.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import int4
from pallas_kernels.contract import Call, Options, Pool
from pallas_kernels.patterns import FAR, FULL, Pattern

WINDOW = Pattern(window=40)
SINKS = Pattern(window=24, num_sinks=4)
SINKS_IN_CACHE = Pattern(window=24, num_sinks=4, sink_position=1)
SINKS_AT_CEILING = Pattern(window=24, num_sinks=6, sink_position=2, sink_ceiling=50)
DILATED = Pattern(window=90, stride=3)
GLOBAL = Pattern(window=20, has_global=1, global_every=37)


@dataclasses.dataclass(frozen=True)
class Spec:
    """One set of arguments.

    rows: for each row its length in tokens and the number of queries, its last tokens. (0, 0) is an empty row.
    q_tile: Q, queries of one tile; a row with more has several tiles, the last one padded.
    layer: the one of num_layers that is attended to; the others hold other data.
    codes: int4, int8 or float8_e4m3fn for a quantised pool, with scales; "" for one of `dtype`.
    sink_queries: J of q_sink; 0 for no sink query.
    key_rope: keys are rotated when they are read.
    evict_every: every n-th block of a row is missing from its table, except the first and those with queries;
      0 for none.
    slack: entries of the table beyond the longest row.
    sides: of the pool; 1 for keys and values at once, of which codes in int8 have 64 rotated numbers next to them.
    """

    rows: tuple[tuple[int, int], ...]
    q_tile: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    num_layers: int = 2
    layer: int = 1
    dtype: str = "bfloat16"
    codes: str = ""
    pattern: Pattern = FULL
    sink_queries: int = 0
    soft_cap: float | None = None
    sink_logits: bool = False
    key_rope: bool = False
    return_lse: bool = False
    evict_every: int = 0
    slack: int = 2
    sides: int = 2
    seed: int = 0

    def __str__(self) -> str:
        """Returns shape and unusual fields, for example q1_n4_k2_h64_b16_bfloat16_window=40_rows=130/1,1/1."""
        parts = [f"q{self.q_tile}", f"n{self.num_heads}", f"k{self.num_kv_heads}", f"h{self.head_dim}"]
        parts += [f"b{self.block_size}", self.dtype] + [self.codes] * bool(self.codes)
        parts += ["latents"] * (self.sides == 1)
        parts += [f"{k}={v}" for k, v in self.pattern._asdict().items() if v != getattr(FULL, k)]
        for name in ("sink_queries", "soft_cap", "sink_logits", "key_rope", "return_lse", "evict_every"):
            if value := getattr(self, name):
                parts.append(name if value is True else f"{name}={value:g}")
        rows = [f"{length}/{queries}" for length, queries in self.rows]
        parts.append("rows=" + (",".join(rows) if len(rows) <= 8 else f"{len(rows)}x"))
        return "_".join(parts)


class Layout(NamedTuple):
    """Places of a spec's tokens, as numpy arrays. readable: [M, B] True if a slot of the pool holds numbers."""

    tables: np.ndarray
    starts: np.ndarray
    positions: np.ndarray
    readable: np.ndarray


def layout(spec: Spec) -> Layout:
    """Block tables and positions of a spec's tiles, and the slots of the pool that hold numbers: the written ones of
    blocks with a token that some query sees."""
    rng = np.random.default_rng(spec.seed)
    size = spec.block_size
    owned = [-(-length // size) for length, _ in spec.rows]
    width, num_blocks = max(owned) + spec.slack, sum(owned) + 3
    ids = rng.permutation(num_blocks).astype(np.int32)
    free, readable = ids[:3], np.zeros((num_blocks, size), bool)
    tables, starts, positions = [], [], []
    taken = 3
    for (length, num_queries), count in zip(spec.rows, owned):
        blocks, begin = ids[taken : taken + count], size * np.arange(count, dtype=np.int32)
        taken += count
        kept = np.ones(count, bool)
        if spec.evict_every:
            kept[1:] = (np.arange(1, count) % spec.evict_every != 0) | (begin[1:] + size > length - num_queries)
        blocks, begin = blocks[kept], begin[kept]
        table = rng.choice(free, width)
        table[: len(blocks)] = blocks
        start = np.full(width, FAR, np.int32)
        start[: len(blocks)] = begin
        tiles = max(-(-num_queries // spec.q_tile), 1)
        position = np.full(tiles * spec.q_tile, -1, np.int32)
        position[:num_queries] = np.arange(length - num_queries, length)
        for tile in position.reshape(tiles, spec.q_tile):
            tables.append(table)
            starts.append(start)
            positions.append(tile)
            if tile.max() >= 0:
                shown = spec.pattern.sees_some(tile[0], tile.max(), begin, size)
                readable[blocks[shown]] |= begin[shown, None] + np.arange(size) < length
    return Layout(np.stack(tables), np.stack(starts), np.stack(positions), readable)


def make(spec: Spec) -> Call:
    """Makes a call on jax's default device.

    Scores have a standard deviation of 2, so that a softmax is neither flat nor a single token.
    """
    rng = np.random.default_rng((spec.seed, 1))
    dtype = jnp.dtype(spec.dtype)
    tables, starts, positions, readable = layout(spec)

    def normal(*shape, scale=1.0):
        return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(dtype)

    query = (spec.num_heads, spec.head_dim)
    scale = 2 * spec.head_dim**-0.5
    q = normal(*positions.shape, *query, scale=scale)
    pool = Pool(*_pool(rng, spec, readable))
    q_sink = normal(*positions.shape, spec.sink_queries, *query, scale=scale) if spec.sink_queries else None
    sinks = rng.standard_normal(spec.num_heads, np.float32) if spec.sink_logits else None
    angles = np.arange(tables.shape[1] * spec.block_size)[:, None] * 0.9 ** np.arange(spec.head_dim // 2)
    key_rope = (np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)) if spec.key_rope else None
    call = Call(
        q,
        pool,
        tables,
        starts,
        positions,
        layer=spec.layer,
        pattern=spec.pattern,
        options=Options(q_sink, sinks, key_rope=key_rope, soft_cap=spec.soft_cap, return_lse=spec.return_lse),
    )
    # Numbers of the pattern and the layer stay Python's.
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, call)


def _pool(rng: np.random.Generator, spec: Spec, readable: np.ndarray):
    """Makes the leaves of a pool, with scales if it has codes; numbers where readable [M, B], else NaN."""
    shape = (len(readable), spec.num_layers, spec.sides, spec.num_kv_heads, spec.block_size, spec.head_dim)
    if spec.codes == "int4":
        return _four_bits(rng.standard_normal(shape, np.float32), readable)
    if spec.codes and spec.sides == 1:
        return _latents(rng, shape, readable)
    pool, scales = np.empty(shape, jnp.dtype(spec.codes or spec.dtype)), np.empty(shape[:-1], np.float32)
    for block, block_scales, mask in zip(pool, scales, readable):
        if spec.codes:
            block[...], block_scales[...] = _quantised(rng, block)
            block_scales[..., ~mask] = np.nan
        else:
            block[...] = rng.standard_normal(block.shape, np.float32)
        if spec.codes != "int8":
            block[..., ~mask, :] = np.nan
    return pool, scales if spec.codes else None


def _latents(rng: np.random.Generator, shape: tuple[int, ...], readable: np.ndarray):
    """Draws latents in 8 bits. Scales of a latent's groups of 128 codes are up to 4 times larger or smaller."""
    *vectors, head_dim = shape
    x = rng.standard_normal((*vectors, (head_dim - 64) // 128, 128), np.float32)
    scales = np.abs(x).max(axis=-1) / 127
    codes = (x / scales[..., None]).round().astype(np.int8).reshape(*vectors, -1)
    scales *= 2 ** rng.uniform(-2, 2, scales.shape).astype(np.float32)
    rotated = rng.standard_normal((*vectors, 64), np.float32).astype(jnp.bfloat16)
    for part in (scales, rotated):
        part[np.broadcast_to(~readable[:, None, None, None], part.shape[:-1])] = np.nan
    return codes, scales, None, None, rotated


def _quantised(rng: np.random.Generator, block: np.ndarray):
    """Draws codes and scales of a block [L, 2, K, B, H]. Values are up to 2^6 times larger or smaller than keys."""
    x = rng.standard_normal(block.shape, np.float32)
    largest = 127.0 if block.dtype == np.int8 else float(jnp.finfo(block.dtype).max)
    scale = np.abs(x).max(axis=-1) / largest
    codes = x / scale[..., None]
    scale[:, 1] *= 2 ** rng.uniform(-6, 6, scale[:, 1].shape).astype(np.float32)
    return (codes.round() if block.dtype == np.int8 else codes).astype(block.dtype), scale


def _four_bits(x, readable: np.ndarray):
    """Makes codes and scales of a pool [M, L, 2, K, B, H], NaN for groups and tokens without a readable slot."""
    codes, scales = map(np.array, jax.jit(int4.quantise)(x))
    written = readable.reshape(len(readable), 1, 1, -1, 1, int4.GROUP)  # [M, L, K, G, 2, H] of scales
    nan = jnp.bfloat16(jnp.nan)
    np.copyto(scales[:, :, 0], nan, where=~written.any(axis=-1, keepdims=True))
    np.copyto(scales[:, :, 1], nan, where=~np.tile(written, x.shape[-1] // int4.GROUP))
    return codes, scales


def _each(common: dict, *variations: dict) -> tuple[Spec, ...]:
    """Makes a spec for each variation, with seeds that count up from the common one."""
    seed = common.get("seed", 0)
    return tuple(Spec(**{**common, "seed": seed + i, **variation}) for i, variation in enumerate(variations))


# Specs that an interpreter of GPU programs runs in a second each.
TINY = (
    *_each(
        dict(rows=((130, 1), (0, 0), (16, 1)), sink_logits=True, return_lse=True),
        dict(),
        dict(pattern=SINKS, num_heads=8, block_size=64, soft_cap=15.0, dtype="float16"),
        dict(pattern=SINKS_IN_CACHE, sink_queries=1, evict_every=3),
    ),
    *_each(
        dict(rows=((75, 9), (1, 1)), q_tile=4, return_lse=True, seed=10),
        dict(),
        dict(pattern=SINKS_AT_CEILING, sink_queries=6, num_heads=2, num_kv_heads=1),
    ),
)

# Quantised keys and values, as small.
TINY_QUANTISED = _each(
    dict(rows=((130, 1), (0, 0), (16, 1)), sink_logits=True, return_lse=True, seed=40),
    dict(codes="int8", evict_every=3),
    dict(codes="float8_e4m3fn", pattern=SINKS, num_heads=8, head_dim=128, block_size=64, soft_cap=15.0),
    dict(codes="int8", pattern=SINKS_IN_CACHE, sink_queries=1, block_size=32, head_dim=96),
    dict(codes="float8_e4m3fn", pattern=SINKS_AT_CEILING, sink_queries=6, rows=((75, 9), (1, 1)), q_tile=4),
    dict(codes="int4", num_heads=2, block_size=64, head_dim=128, evict_every=2, soft_cap=15.0),
    dict(codes="int4", num_heads=2, num_kv_heads=1, block_size=128, pattern=SINKS_IN_CACHE, sink_queries=1, q_tile=4),
)

# Latents: one part of query heads or two, whole latents of DeepSeek's size last.
LATENTS = _each(
    dict(rows=((330, 1), (40, 1)), num_kv_heads=1, sides=1, block_size=64, seed=60),
    dict(rows=((130, 1), (0, 0), (16, 1)), num_heads=128, head_dim=192, return_lse=True),
    dict(rows=((75, 9), (1, 1)), q_tile=4, num_heads=20, head_dim=128, pattern=SINKS),
    dict(rows=((300, 1), (64, 1)), num_heads=3, head_dim=320, dtype="float16", evict_every=3),
    dict(rows=((150, 1),), num_heads=16, head_dim=192, block_size=16, pattern=WINDOW),
    dict(num_heads=16, head_dim=576),
    dict(num_heads=128, head_dim=576),
)

# DeepSeek's latents in 8 bits.
LATENTS_8_BITS = _each(
    dict(num_kv_heads=1, head_dim=576, sides=1, codes="int8", block_size=64, return_lse=True, seed=70),
    dict(rows=((150, 1), (40, 1))),
    dict(rows=((130, 1), (0, 0), (16, 1)), num_heads=128, block_size=16),
    dict(rows=((75, 9), (1, 1)), q_tile=4, num_heads=16, pattern=SINKS, evict_every=3, block_size=32),
    dict(rows=((600, 1),), num_heads=128, block_size=128),
)

# Lengths at, before and after the edges of blocks and of pieces of 64 and 128 tokens.
RAGGED = ((257, 1), (0, 0), (1, 1), (64, 1), (63, 1), (129, 1), (16, 1))
# A long chunk with a padded last tile, a whole prompt, an empty row, a decoding row, a prompt of one token.
CHUNKED = ((150, 37), (23, 23), (0, 0), (129, 1), (1, 1))

# Specs that run quickly with interpret=True. Specs that differ only in their pattern share a compilation.
SMALL = (
    *_each(
        dict(rows=RAGGED, sink_logits=True, return_lse=True),
        dict(),
        dict(pattern=WINDOW),
        dict(pattern=SINKS, evict_every=3),
        dict(pattern=DILATED),
        dict(pattern=GLOBAL, evict_every=4),
    ),
    *_each(
        dict(rows=RAGGED, seed=10),
        dict(num_heads=2, block_size=32, num_layers=3, layer=0),  # MHA
        dict(num_heads=8, num_kv_heads=1, block_size=64, dtype="float16", slack=7),  # MQA
        dict(num_heads=6, head_dim=96, block_size=128, pattern=GLOBAL),  # a group of 3
        dict(num_heads=8, head_dim=128, soft_cap=10.0, evict_every=2),
        dict(head_dim=256, sink_logits=True, return_lse=True, dtype="float16"),
        dict(pattern=SINKS_IN_CACHE, sink_queries=1, soft_cap=20.0, return_lse=True),
        dict(pattern=SINKS_AT_CEILING, sink_queries=6, head_dim=128, block_size=32),
    ),
    *_each(
        dict(rows=CHUNKED, q_tile=8, sink_logits=True, return_lse=True, seed=20),
        dict(),
        dict(pattern=WINDOW),
        dict(pattern=SINKS, evict_every=3),
        dict(pattern=DILATED),
        dict(pattern=GLOBAL, evict_every=4),
    ),
    *_each(
        dict(rows=CHUNKED, q_tile=8, seed=30),
        dict(q_tile=4, num_heads=2, block_size=32, num_layers=3, layer=0),
        dict(q_tile=16, num_heads=8, num_kv_heads=1, block_size=64, dtype="float16", soft_cap=10.0),
        dict(q_tile=5, num_heads=6, head_dim=96, block_size=128, pattern=SINKS),
        dict(head_dim=128, num_heads=8, evict_every=2, pattern=WINDOW),
        dict(head_dim=256, dtype="float16", return_lse=True),
        dict(q_tile=16, pattern=SINKS_IN_CACHE, sink_queries=1, soft_cap=20.0, return_lse=True),
        dict(pattern=SINKS_AT_CEILING, sink_queries=6, head_dim=128, block_size=32),
    ),
)

# Keys that are stored unrotated.
ROTATED = (
    Spec(rows=RAGGED, key_rope=True, soft_cap=20.0, return_lse=True, seed=50),
    Spec(rows=CHUNKED, key_rope=True, q_tile=8, num_heads=6, head_dim=96, block_size=32, seed=51),
)

_K = 1024
_LLAMA_8B = dict(num_heads=32, num_kv_heads=8, head_dim=128, block_size=64, slack=0)

# Shapes of Llama-8B's attention, by name. Pools of up to 2 GiB: no data until `make` or `layout` is called.
BENCH = {
    name: Spec(**{**_LLAMA_8B, **fields})
    for name, fields in {
        "decode 1x4k": dict(rows=((4 * _K, 1),)),
        "decode 1x32k": dict(rows=((32 * _K, 1),)),
        "decode 8x8k": dict(rows=((8 * _K, 1),) * 8),
        "decode 32x4k": dict(rows=((4 * _K, 1),) * 32),
        "decode 64x4k": dict(rows=((4 * _K, 1),) * 64),
        "decode 256x512": dict(rows=((512, 1),) * 256),
        "decode 1x128k+31x4k": dict(rows=((128 * _K, 1), *((4 * _K, 1),) * 31)),
        "decode 64x4k, blocks of 16": dict(rows=((4 * _K, 1),) * 64, block_size=16),
        "decode 8x1k": dict(rows=((1 * _K, 1),) * 8),
        "decode 8x32k, window 1k + 4 sinks": dict(rows=((32 * _K, 1),) * 8, pattern=Pattern(window=_K, num_sinks=4)),
        "prefill 8k": dict(rows=((8 * _K, 8 * _K),), q_tile=32),
        "chunk of 512 at 4k + 64 decodes at 4k": dict(rows=((4 * _K, 512), *((4 * _K, 1),) * 64), q_tile=32),
    }.items()
}
