"""`PartitionSpec`s: the axis of each array that devices divide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import LayerSpec
from ksana_jax.kv.layout import KV_HEADS
from ksana_jax.models.params import LayerParams, Params, stated, weight_fields
from ksana_jax.ops.pool import KVCache
from ksana_jax.sharding.shares import SETTING

# Name of the mesh's axis.
AXIS = "tensor"
# Specs of replicated arrays, and of the pool's leaves [M, *shape], whose KV heads are divided; of states, heads or
# channels.
EVERYWHERE = PartitionSpec()
BY_HEAD = PartitionSpec(*[None] * (1 + KV_HEADS), AXIS)


def field_of(path: Any) -> str:
    """Returns the field of Params or LayerParams that a path from `jax.tree_util` leads to, or into."""
    names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    fields = weight_fields()
    return next(name for name in reversed(names) if name in fields)


def layer_of(path: Any, config: ModelConfig) -> LayerSpec | None:
    """Returns the layer of a model that a path in Params leads into; None outside layers."""
    return config.layers[path[1].idx] if path[0].name == "layers" else None


def spec_of_weight(path: Any, shape: Sequence[int]) -> PartitionSpec:
    """Returns the spec of a leaf of Params or LayerParams, from its path and shape."""
    weight = stated(field_of(path), SETTING)
    stack = (None,) * weight.stacked
    if weight.divides == "columns" and len(shape) > 1 + weight.stacked:
        return PartitionSpec(*stack, None, AXIS)
    # A number for each row, such as a scale, has no columns to divide.
    return EVERYWHERE if weight.divides in ("whole", "once", "columns") else PartitionSpec(*stack, AXIS)


def specs_of(argument: Any) -> Any:
    """Returns the specs of one argument, a tree like it: weights, pools, or replicated arguments, including a host-side
    embedding, which no program reads."""

    def of_weight(path: Any, weight: Any) -> PartitionSpec:
        return EVERYWHERE if isinstance(weight, np.ndarray) else spec_of_weight(path, weight.shape)

    def of(part: Any) -> Any:
        if isinstance(part, (Params, LayerParams)):
            return jax.tree_util.tree_map_with_path(of_weight, part)
        spec = BY_HEAD if isinstance(part, KVCache) else EVERYWHERE
        return jax.tree.map(lambda _: spec, part)

    return jax.tree.map(of, argument, is_leaf=lambda part: isinstance(part, (Params, LayerParams, KVCache)))
