"""Timed cases: shapes of attention with their bytes, and random arguments for them, made on the device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.contract import Call, Options, Pool
from pallas_kernels.patterns import FAR, FULL, Pattern

# Lengths of rows of the shapes of decode.
DECODE: dict[str, tuple[int, ...]] = {
    "64x4k": (4096,) * 64,
    "1x4k": (4096,),
    "8x8k": (8192,) * 8,
    "1x128k+31x4k": (131072,) + (4096,) * 31,
    "32x4k": (4096,) * 32,
    "1x32k": (32768,),
    "256x512": (512,) * 256,
}
# Successive calls read different layers of this total size: more than four times the L2 of an H200 (60 MB).
ROTATED_BYTES = 512 * 2**20


class Arguments(NamedTuple):
    """Arrays of a `Call`.

    q: [S, Q, N, H]. pool: [M, L, 2, K, B, H], of latents [M, L, 1, K, B, H]. tables, starts: [S, P]. positions: [S, Q].
    """

    q: Any
    pool: Any
    tables: Any
    starts: Any
    positions: Any

    def call(self, *, layer: Any = 0, pattern: Any = FULL, scales: Any = None, **options: Any) -> Call:
        """The call of a kernel. options: fields of Options."""
        pool = Pool(self.pool, scales)
        more = Options(**options)
        return Call(self.q, pool, self.tables, self.starts, self.positions, layer=layer, pattern=pattern, options=more)


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of attention.

    lengths: tokens of each row's text, the queries' own included. queries: of a tile, the newest tokens of its row; one
    row of length n has ceil(n / queries) tiles where `prefill`, otherwise one. shared: leading tokens that all rows
    share, a multiple of the block size. rank: of latents, the numbers of one that are values; 0 for keys and values.
    """

    name: str
    lengths: tuple[int, ...]
    block_size: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    queries: int = 1
    prefill: bool = False
    pattern: tuple[int, ...] = tuple(Pattern())
    shared: int = 0
    tiny: bool = False
    rank: int = 0

    @property
    def sides(self) -> int:
        return 1 if self.rank else 2

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in one layer: keys and values, 2 bytes an element."""
        return 2 * self.sides * self.num_kv_heads * self.block_size * self.head_dim

    def blocks_of(self, length: int) -> int:
        return -(-length // self.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks that hold something; shared ones once."""
        shared = self.shared // self.block_size
        return shared + sum(self.blocks_of(n) - shared for n in self.lengths)

    def visible(self) -> int:
        """Tokens whose keys and values are read for one-token rows, each row's counted separately."""
        window, sinks = self.pattern[0], self.pattern[1]
        return sum(min(n, window) + max(min(sinks, n - window), 0) for n in self.lengths)

    @property
    def bytes(self) -> int:
        """Least bytes of one call: keys and values of the visible tokens, once each."""
        return 2 * self.sides * self.num_kv_heads * self.head_dim * self.visible()

    @property
    def flops(self) -> int:
        """4 N H for each pair of a query and a key that it sees, causally; with latents 2 N (H + rank)."""
        pairs = 0
        for n in self.lengths:
            queries = n if self.prefill else self.queries
            pairs += queries * (2 * n - queries + 1) // 2
        return 2 * self.num_heads * (self.head_dim + (self.rank or self.head_dim)) * pairs

    @property
    def num_layers(self) -> int:
        """Layers of the pool: enough that calls on one after the other find nothing in the L2. At most 32 GB in all."""
        wanted = max(1, -(-ROTATED_BYTES // self.bytes))
        return 2 if self.tiny else min(wanted, max(1, 2**35 // (self.num_blocks * self.block_bytes)))

    def random(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries and pool. Keys and values are normal, so that scores are of the order of one."""
        q, pool = self.shapes()[:2]
        q_key, pool_key = jax.random.split(key)
        scale = jnp.asarray(2 * self.head_dim**-0.5, q.dtype)
        return jax.random.normal(q_key, q.shape, q.dtype) * scale, jax.random.normal(pool_key, pool.shape, pool.dtype)

    def arguments(self, random: Any = None, seed: int = 0) -> Arguments:
        """Random arguments; `random` is the method of that name, compiled."""
        # Blocks lie in random order, as after much allocating and freeing.
        order = np.random.default_rng(seed).permutation(self.num_blocks).astype(np.int32)
        shared, width = self.shared // self.block_size, max(map(self.blocks_of, self.lengths))
        tables = np.zeros((self.num_rows, width), np.int32)
        starts = np.full((self.num_rows, width), FAR, np.int32)
        used = shared
        for row, length in enumerate(self.lengths):
            count = self.blocks_of(length)
            tables[row, :shared] = order[:shared]
            tables[row, shared:count] = order[used : used + count - shared]
            starts[row, :count] = self.block_size * np.arange(count)
            used += count - shared
        if self.prefill:
            tiles = [-(-n // self.queries) for n in self.lengths]
            tables, starts = np.repeat(tables, tiles, axis=0), np.repeat(starts, tiles, axis=0)
        q, pool = (random or self.random)(jax.random.key(seed))
        return Arguments(q, pool, *(jnp.asarray(x) for x in (tables, starts, self._positions())))

    def _positions(self) -> np.ndarray:
        if not self.prefill:
            return np.array([[n - self.queries + i for i in range(self.queries)] for n in self.lengths], np.int32)
        tiles = []
        for n in self.lengths:
            padded = np.full(-(-n // self.queries) * self.queries, -1, np.int32)
            padded[:n] = np.arange(n)
            tiles.append(padded.reshape(-1, self.queries))
        return np.concatenate(tiles)

    def shapes(self) -> Arguments:
        """jax.ShapeDtypeStruct of the arguments that `make` returns."""
        rows = sum(-(-n // self.queries) for n in self.lengths) if self.prefill else self.num_rows
        width = max(map(self.blocks_of, self.lengths))
        pool = (self.num_blocks, self.num_layers, self.sides, self.num_kv_heads, self.block_size, self.head_dim)
        ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        floats = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        return Arguments(
            floats((rows, self.queries, self.num_heads, self.head_dim)),
            floats(pool),
            ints((rows, width)),
            ints((rows, width)),
            ints((rows, self.queries)),
        )


def decode_cases(block_size: int, tiny: bool) -> list[Case]:
    """The seven shapes of decode: 16.8 to 1,074 MB of keys and values."""
    if tiny:
        small = functools.partial(Case, block_size=block_size, num_heads=4, num_kv_heads=2, head_dim=64, tiny=True)
        return [small("2x100", (100,) * 2), small("mix 1x200+3x60", (200, 60, 60, 60))]
    return [Case(name, lengths, block_size) for name, lengths in DECODE.items()]


def latent_cases(tiny: bool) -> list[Case]:
    """Decode over DeepSeek's latents: 38 to 604 MB of them, with 16 and with 128 query heads."""
    small = Case("16 heads, 2x100", (100,) * 2, 16, 16, 1, 192, rank=128, tiny=True)
    if tiny:
        return [small, dataclasses.replace(small, name="128 heads, 2x100", num_heads=128)]
    return [
        Case(f"{heads} heads, {rows}x{length // 1024}k", (length,) * rows, 64, heads, 1, 576, rank=512)
        for heads, rows, length in (
            (16, 128, 4096),
            (128, 64, 8192),
            (16, 64, 8192),
            (128, 64, 4096),
            (16, 1, 32_768),
            (128, 1, 32_768),
        )
    ]
