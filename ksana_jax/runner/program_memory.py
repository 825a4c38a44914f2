"""Memory of one compiled program besides weights and pool."""

from __future__ import annotations

import math
from typing import Any

import jax

from ksana_jax.models.params import LayerParams, Params
from ksana_jax.ops.pool import KVCache


def bytes_of(compiled: Any) -> int | None:
    """Returns the bytes that a compiled program takes while it runs; see `planner.step_memory.program_bytes`."""
    if hasattr(compiled, "program_bytes"):  # of the store
        return compiled.program_bytes
    arguments, _ = compiled.args_info

    def weights_or_pool(x: Any) -> bool:
        return isinstance(x, Params | LayerParams | KVCache)

    given = [leaf for leaf in jax.tree.leaves(arguments, is_leaf=weights_or_pool) if not weights_or_pool(leaf)]
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    # The pool is among the results: as an alias if it was donated.
    alias = memory.alias_size_in_bytes or _returned_pool_bytes(compiled)
    new = memory.temp_size_in_bytes + memory.output_size_in_bytes - alias
    return new + sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in given)


def _returned_pool_bytes(compiled: Any) -> int:
    """Returns the bytes of the pools among a program's results."""
    results = jax.tree.unflatten(compiled.out_tree, jax.tree.leaves(compiled.out_info))
    pools = jax.tree.leaves(results, is_leaf=lambda x: isinstance(x, KVCache))
    arrays = [leaf for pool in pools if isinstance(pool, KVCache) for leaf in jax.tree.leaves(pool)]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays)
