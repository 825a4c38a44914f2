"""Query tiles of a call as the Hopper kernels take them: matrices of 64 rows, queries x query heads of a group."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.contract import Call
from pallas_kernels.hopper.common import LOG2E, ROWS
from pallas_kernels.work import split_tiles


class Tiles(NamedTuple):
    """Tiles of the queries [S, Q] of a call: `matrices` matrices of `queries` queries, for each kv head.

    count: tiles of a row of Q queries. rows: of a matrix in memory; rows beyond queries * group are padding.
    """

    num_rows: int
    width: int
    count: int
    matrices: int
    queries: int
    num_kv_heads: int
    group: int
    rows: int

    @classmethod
    def of(cls, call: Call, matrices: int = 1, parts: int = 1) -> Tiles:
        """Matrices as small as the queries allow, in steps of 8 rows; of 64 rows where a tile has several.

        parts: of the query heads of each kv head; each is in matrices of its own, as if it had its own kv head.
        """
        s, width, _, _ = call.q.shape
        group = call.group // parts
        queries = ROWS // group if matrices > 1 else min(ROWS // group, width)
        rows = ROWS if matrices > 1 else -(-queries * group // 8) * 8
        count = -(-width // (matrices * queries))
        return cls(s, width, count, matrices, queries, call.pool.kv.shape[3] * parts, group, rows)

    def split(self, call: Call) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Tables and starts [S * count, P] of the tiles, and positions [S * count, queries of a tile at most]."""
        return split_tiles(call.tables, call.starts, call.positions, self.matrices * self.queries)

    def pack(self, x: jax.Array, fill: float = 0) -> jax.Array:
        """x [S, Q, N, ...] as matrices [S * count * K * matrices, rows, ...]."""
        more = x.shape[3:]
        x = self._padded(x, fill)
        x = x.reshape(-1, self.matrices, self.queries, self.num_kv_heads, self.group, *more)
        x = jnp.moveaxis(x, 3, 1).reshape(-1, self.queries * self.group, *more)
        return jnp.pad(x, self._padding(x, axis=1), constant_values=fill)

    def pack_queries(self, q: jax.Array, padded: bool) -> jax.Array:
        """Queries [S, Q, N, H] as matrices [S * count * K, rows, H] for `common.fetch_rows`.

        For tiles of one query and a group of fewer than 8 heads they are [S * K, group, H], as stored: nothing is
        copied. padded: no matrix has fewer rows, for jax's interpreter, which reads nothing beyond an array.
        """
        if self.width == 1 and self.group < 8 and not padded:
            return q.reshape(-1, self.group, q.shape[3])
        return self.pack(q)

    def pack_sink_queries(self, q_sink: jax.Array | None, dtype) -> jax.Array | None:
        """[S, Q, J, N, H] as [S * count * K * matrices, J, rows, H]."""
        if q_sink is None:
            return None
        return jnp.moveaxis(self.pack(jnp.moveaxis(q_sink.astype(dtype), 2, 3)), 2, 1)

    def pack_positions(self, positions: jax.Array) -> jax.Array:
        """[S, Q] as [S * count, matrices, 64], of each row; -1 without a query."""
        x = jnp.repeat(self._padded(positions, -1).reshape(-1, self.matrices, self.queries), self.group, axis=2)
        return jnp.pad(x, ((0, 0), (0, 0), (0, ROWS - x.shape[2])), constant_values=-1)

    def pack_sinks(self, sinks: jax.Array | None) -> jax.Array | None:
        """Learned sink logits [N] in base 2, of the rows of each kv head [K, 64]."""
        if sinks is None:
            return None
        of_heads = sinks.astype(jnp.float32).reshape(self.num_kv_heads, 1, self.group) * LOG2E
        x = jnp.broadcast_to(of_heads, (self.num_kv_heads, self.queries, self.group)).reshape(self.num_kv_heads, -1)
        return jnp.pad(x, ((0, 0), (0, ROWS - x.shape[1])))

    def unpack(self, x: jax.Array) -> jax.Array:
        """Matrices [S * count * K * matrices, rows, ...] as [S, Q, N, ...]."""
        more = x.shape[2:]
        x = x[:, : self.queries * self.group]
        x = x.reshape(-1, self.num_kv_heads, self.matrices, self.queries, self.group, *more)
        return jnp.moveaxis(x, 1, 3).reshape(self.num_rows, -1, self.num_kv_heads * self.group, *more)[:, : self.width]

    def _padded(self, x, fill):
        more = self.count * self.matrices * self.queries - self.width
        return jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2)), constant_values=fill)

    def _padding(self, x, axis: int):
        return [(0, self.rows - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]


def where_queried(call: Call, x: jax.Array, nothing) -> jax.Array:
    """x [S, Q, N, ...], but `nothing` without a query."""
    return jnp.where(call.positions.reshape(*call.positions.shape, *(1,) * (x.ndim - 2)) >= 0, x, nothing)
