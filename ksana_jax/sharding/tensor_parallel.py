"""Arrays and programs of an engine divided among several devices: tensor parallelism."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ksana_jax.core.config import ModelConfig
from ksana_jax.kv.layout import KV_HEADS, KVLayout
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import Params, heads_of
from ksana_jax.ops.new_pool import make_cache
from ksana_jax.ops.pool import KVCache
from ksana_jax.sampling.vocabulary import Vocabulary
from ksana_jax.sharding.operators import DividedOperators
from ksana_jax.sharding.placement import Placement
from ksana_jax.sharding.shares import WHOLE_WEIGHT, Share, local_layout, local_model, pool_layout, share
from ksana_jax.sharding.specs import AXIS, BY_HEAD, EVERYWHERE, field_of, layer_of, spec_of_weight, specs_of
from ksana_jax.sharding.vocabulary import DividedVocabulary

# The axis of kv heads in a leaf of the pool.
_HEADS = 1 + KV_HEADS


class TensorParallel(Placement):
    """Several devices, each with a part of the heads, of the hidden units of MLPs and of the vocabulary."""

    def __init__(self, devices: Sequence[Any]):
        self._here = self.of_this_process(devices)
        super().__init__(self._here[0])
        self.num_devices = len(devices)
        self.mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))

    @staticmethod
    def of_this_process(devices: Sequence[Any]) -> Sequence[Any]:
        """Returns the devices that belong to this process."""
        return [device for device in devices if device.process_index == jax.process_index()]

    @property
    def num_local(self) -> int:
        return len(self._here)

    def connect(self) -> None:
        """Sums a value over all devices, which connects the processes.

        On a CPU gloo reports the connection on standard output, which belongs to the program's output.
        """
        if self.num_local == self.num_devices:
            return
        sum_up = self.jit(lambda x: jax.lax.psum(x, AXIS))
        run = sum_up.trace(jax.ShapeDtypeStruct((), np.int32)).lower().compile()
        sys.stdout.flush()
        saved, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, 1)
            assert int(run(np.int32(1))) == self.num_devices
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            os.close(nowhere)

    def local_model(self, config: ModelConfig) -> ModelConfig:
        return local_model(config, self.num_devices)

    def pool_layout(self, layout: KVLayout) -> KVLayout:
        return pool_layout(layout, self.num_devices)

    def local_layout(self, layout: KVLayout) -> KVLayout:
        return local_layout(layout, self.num_devices)

    def host_layout(self, layout: KVLayout) -> KVLayout:
        pool = self.pool_layout(layout).num_kv_heads
        here, of_head = pool * self.num_local // self.num_devices, pool // layout.num_kv_heads
        if here % of_head and of_head % here:
            return layout.with_heads(here)  # some heads are here more often than others
        return layout.with_heads(max(here // of_head, 1))

    def operators(self, operators: Operators) -> Operators:
        return DividedOperators(operators.linear, operators.normaliser, grouped=operators.grouped)

    def vocabulary(self, config: ModelConfig) -> Vocabulary:
        return DividedVocabulary(config.vocab_size, self.num_devices, features=self.features)

    def params(self, config: ModelConfig, params: Params, embedding_device: str = "device") -> Params:
        embed = params.embed
        if embedding_device == "host":
            params = params.replace(embed=None)  # pyright: ignore[reportAttributeAccessIssue]
        placed = jax.tree_util.tree_map_with_path(functools.partial(self.drawn, config), params)
        if embedding_device != "host":
            return placed
        if isinstance(embed, jax.ShapeDtypeStruct):  # an array of no memory, which is told from a weight of devices
            embed = np.broadcast_to(np.zeros((), embed.dtype), embed.shape)
        return placed.replace(embed=embed)

    def drawn(self, config: ModelConfig, path: Any, weight: Any) -> Any:
        if isinstance(weight, jax.Array) and getattr(weight.sharding, "mesh", None) == self.mesh:
            wanted = NamedSharding(self.mesh, spec_of_weight(path, weight.shape))
            # Between processes, a copy to where the array is would be a collective.
            return weight if weight.sharding == wanted else jax.device_put(weight, wanted)
        return self.weight(config, path, weight.shape, functools.partial(_taken, weight))

    def weight(self, config: ModelConfig, path: Any, shape: tuple[int, ...], read: Callable[[Share], Any]) -> Any:
        divided, parts, field = spec_of_weight(path, shape) != EVERYWHERE, [], field_of(path)
        num_heads = heads_of(field, layer_of(path, config))
        for index, device in enumerate(self.mesh.devices.flat):
            if device not in self._here:
                continue
            mine = WHOLE_WEIGHT
            if divided:
                mine = share(field, shape, index, self.num_devices, num_heads)
            part = read(mine)
            if not isinstance(part, jax.ShapeDtypeStruct):
                part = jax.block_until_ready(jax.device_put(part, device))
            parts.append(part)
        return jax.tree.map(functools.partial(self._whole, path), *parts)

    def _whole(self, path: Any, *parts: Any) -> Any:
        """Returns one array of a weight, from each device's part."""
        spec = spec_of_weight(path, parts[0].shape)
        sharding = NamedSharding(self.mesh, spec)
        factors = [self.num_devices if name == AXIS else 1 for name in (*spec, *[None] * parts[0].ndim)]
        whole = tuple(size * factor for size, factor in zip(parts[0].shape, factors, strict=False))
        if isinstance(parts[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(whole, parts[0].dtype, sharding=sharding)
        return jax.make_array_from_single_device_arrays(whole, sharding, parts)

    def pool(self, layout: KVLayout, num_blocks: int) -> KVCache:
        make = functools.partial(make_cache, self.pool_layout(layout), num_blocks)
        return jax.jit(make, out_shardings=self.by_head())()

    def everywhere(self, tree: Any) -> Any:
        sharding = NamedSharding(self.mesh, EVERYWHERE)
        if self.num_local == self.num_devices:
            return jax.device_put(tree, sharding)

        def put(x: Any) -> jax.Array:
            parts = [jax.device_put(x, device) for device in self._here]
            return jax.make_array_from_single_device_arrays(np.shape(x), sharding, parts)

        return jax.tree.map(put, tree)

    def by_head(self, memory_kind: str | None = None) -> jax.sharding.Sharding:
        return NamedSharding(self.mesh, BY_HEAD, memory_kind=memory_kind)

    def to_host(self, leaf: jax.Array) -> np.ndarray:
        if self.num_local == self.num_devices:
            heads = np.asarray(leaf)
        else:
            shards = sorted(leaf.addressable_shards, key=lambda shard: shard.index[_HEADS].start)
            heads = np.concatenate([np.asarray(shard.data) for shard in shards], _HEADS)
        return heads

    def from_host(self, leaf: np.ndarray, memory_kind: str | None = None) -> jax.Array:
        sharding = self.by_head(memory_kind)
        if self.num_local == self.num_devices:
            return jax.device_put(leaf, sharding)
        of_device = leaf.shape[_HEADS] // self.num_local
        parts = [
            jax.device_put(part, jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind))
            for part, device in zip(np.split(leaf, self.num_local, _HEADS), self._here, strict=True)
        ]
        whole = list(leaf.shape)
        whole[_HEADS] = of_device * self.num_devices
        return jax.make_array_from_single_device_arrays(tuple(whole), sharding, parts)

    def mapped(self, function: Callable, returns: Any = EVERYWHERE) -> Callable:
        def call(*arguments: Any) -> Any:
            return self._mapped(function, arguments, returns)(*arguments)

        return call

    def _mapped(self, function: Callable, arguments: tuple[Any, ...], returns: Any) -> Callable:
        # Results that are whole are so by sums and gathers, which jax would have to be told.
        specs = tuple(map(specs_of, arguments))
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=returns, check_vma=False)

    def jit(
        self,
        function: Callable,
        *,
        returns: Any = EVERYWHERE,
        donated: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        return _Jitted(self, function, returns, donated, options)

    def shardings(self, specs: Any) -> Any:
        """Returns the shardings of a tree of specs."""
        return jax.tree.map(functools.partial(NamedSharding, self.mesh), specs, is_leaf=_is_spec)


class _Jitted(NamedTuple):
    """Function returned by `TensorParallel.jit`, whose specs follow from the arguments."""

    placement: TensorParallel
    function: Callable
    returns: Any
    donated: int | None
    options: dict[str, Any] | None

    def trace(self, *arguments: Any) -> Any:
        """Traces the function, as `jax.jit(...).trace` does."""
        place = self.placement
        return jax.jit(
            place._mapped(self.function, arguments, self.returns),
            in_shardings=place.shardings(tuple(map(specs_of, arguments))),
            out_shardings=place.shardings(self.returns),
            donate_argnums=self.donated,
            compiler_options=self.options,
        ).trace(*arguments)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _taken(x: Any, share: Share) -> Any:
    """Returns a part of a weight, or its shape."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda x: _taken(x, share), x)
    at = (slice(None),) * share.stacked + share[:2]
    found = x[at[: x.ndim]]
    if not share.padding:
        return found
    return jnp.pad(found, ((0, share.padding), *((0, 0),) * (x.ndim - 1)))
