"""Where an engine's arrays and programs are: on one device, or divided among several. Knows no steps."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ksana_jax.config import ConfigError, ModelConfig
from ksana_jax.devices.capabilities import features
from ksana_jax.devices.features import Features
from ksana_jax.kv.layout import KVLayout
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import Params
from ksana_jax.ops.new_pool import make_cache
from ksana_jax.ops.pool import KVCache
from ksana_jax.parallel.operators import DividedOperators
from ksana_jax.parallel.shares import KV, VOCABULARY, WHOLE_WEIGHT, Share, local_layout, local_model, pool_layout, share
from ksana_jax.parallel.specs import AXIS, BY_HEAD, EVERYWHERE, field_of, spec_of_weight, specs_of
from ksana_jax.parallel.vocabulary import DividedVocabulary
from ksana_jax.sampling.vocabulary import Vocabulary


class Placement:
    """One device, jax's first one unless another is given; programs are compiled for it without further ado."""

    num_devices = 1

    def __init__(self, device: Any = None):
        self._device = device

    @property
    def device(self) -> Any:
        """The first device."""
        return self._device or jax.devices()[0]

    @property
    def features(self) -> Features:
        """What programs are made of on the devices."""
        return features(self.device)

    def local_model(self, config: ModelConfig) -> ModelConfig:
        """Returns the model that one device computes."""
        return config

    def pool_layout(self, layout: KVLayout) -> KVLayout:
        """Returns the layout of the pool of all devices, which repeats kv heads where there are fewer than devices."""
        return layout

    def local_layout(self, layout: KVLayout) -> KVLayout:
        """Returns the layout of one device's pool."""
        return layout

    def operators(self, operators: Operators) -> Operators:
        """Returns operators that a program of the devices computes with."""
        return operators

    def vocabulary(self, config: ModelConfig) -> Vocabulary:
        """Returns what the sampling in a program of the devices knows of the vocabulary."""
        return Vocabulary(features=self.features)

    def params(self, config: ModelConfig, params: Params) -> Params:
        """Places weights, or shapes of weights, which may be there already."""
        return params

    def drawn(self, config: ModelConfig, path: Any, weight: Any) -> Any:
        """Places one weight, or its shape; path: of it in Params, from `jax.tree_util`."""
        return weight

    def sampled(
        self, config: ModelConfig, path: Any, weight: jax.Array, most: int
    ) -> tuple[tuple[int, ...], np.ndarray]:
        """Returns a weight's shape, and between `most` and twice as many of its numbers in order, or all; both are the
        same on any number of devices."""
        flat = weight.reshape(-1)
        return weight.shape, np.asarray(flat[:: _step(flat.size, most)])

    def weight(self, config: ModelConfig, path: Any, shape: tuple[int, ...], read: Callable[[Share], Any]) -> jax.Array:
        """Returns a weight that is read in parts, one for each device, and placed before the next one is read.

        Args:
          path: of the weight in Params, from `jax.tree_util`. shape: of the whole weight.
          read: returns one device's part as a NumPy array.
        """
        return jax.block_until_ready(jax.device_put(read(WHOLE_WEIGHT)))

    def pool(self, layout: KVLayout, num_blocks: int) -> KVCache:
        """Creates an empty pool."""
        return make_cache(self.pool_layout(layout), num_blocks)

    def everywhere(self, tree: Any) -> Any:
        """Puts arrays on each device."""
        return jax.device_put(tree)

    def by_head(self, memory_kind: str | None = None) -> jax.sharding.Sharding:
        """Returns the sharding of blocks [n, *leaf.shape] of the pool, in a kind of memory of the devices."""
        return jax.sharding.SingleDeviceSharding(self.device, memory_kind=memory_kind)

    def mapped(self, function: Callable, returns: Any = EVERYWHERE) -> Callable:
        """Returns a function of whole arrays that computes one of each device's parts of them on each device.

        Args:
          returns: specs of its results: EVERYWHERE or BY_HEAD, of all or in a tuple of each.
        """
        return function

    def jit(
        self,
        function: Callable,
        *,
        returns: Any = EVERYWHERE,
        donated: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        """Returns a jitted function of whole arrays, see `mapped`.

        Args:
          donated: index of the argument that is donated. options: of the compiler.
        """
        return jax.jit(function, donate_argnums=_donated(donated), compiler_options=options)


class TensorParallel(Placement):
    """Several devices, each with a part of the heads, of the hidden units of MLPs and of the vocabulary."""

    def __init__(self, devices: Sequence[Any]):
        super().__init__(devices[0])
        self.num_devices = len(devices)
        self.mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))

    def local_model(self, config: ModelConfig) -> ModelConfig:
        return local_model(config, self.num_devices)

    def pool_layout(self, layout: KVLayout) -> KVLayout:
        return pool_layout(layout, self.num_devices)

    def local_layout(self, layout: KVLayout) -> KVLayout:
        return local_layout(layout, self.num_devices)

    def operators(self, operators: Operators) -> Operators:
        return DividedOperators(operators.linear, operators.normaliser)

    def vocabulary(self, config: ModelConfig) -> Vocabulary:
        return DividedVocabulary(config.vocab_size, self.num_devices, features=self.features)

    def params(self, config: ModelConfig, params: Params) -> Params:
        return jax.tree_util.tree_map_with_path(functools.partial(self.drawn, config), params)

    def drawn(self, config: ModelConfig, path: Any, weight: Any) -> Any:
        if isinstance(weight, jax.Array) and getattr(weight.sharding, "mesh", None) == self.mesh:
            return jax.device_put(weight, NamedSharding(self.mesh, spec_of_weight(path)))
        return self.weight(config, path, weight.shape, functools.partial(_taken, weight))

    def sampled(
        self, config: ModelConfig, path: Any, weight: jax.Array, most: int
    ) -> tuple[tuple[int, ...], np.ndarray]:
        rows, repeats, field = weight.shape[0], 1, field_of(path)
        if field in VOCABULARY:
            rows = config.vocab_size
        elif field in KV:
            repeats = max(self.num_devices // config.num_kv_heads, 1)
            rows //= repeats
        shape = (rows, *weight.shape[1:])
        size = math.prod(shape)
        row, *column = np.unravel_index(np.arange(0, size, _step(size, most)), shape)
        of_head = rows // config.num_kv_heads
        if repeats > 1:
            row = row // of_head * (repeats * of_head) + row % of_head
        return shape, np.asarray(weight[(row, *column)])

    def weight(self, config: ModelConfig, path: Any, shape: tuple[int, ...], read: Callable[[Share], Any]) -> Any:
        spec = spec_of_weight(path)
        sharding, divided = NamedSharding(self.mesh, spec), spec != EVERYWHERE
        parts = []
        for index, device in enumerate(self.mesh.devices.flat):
            mine = WHOLE_WEIGHT
            if divided:
                mine = share(field_of(path), shape, index, self.num_devices, config.num_kv_heads)
            part = read(mine)
            if not isinstance(part, jax.ShapeDtypeStruct):
                part = jax.block_until_ready(jax.device_put(part, device))
            parts.append(part)
        factors = [self.num_devices if name == AXIS else 1 for name in (*spec, *[None] * len(shape))]
        whole = tuple(size * factor for size, factor in zip(parts[0].shape, factors, strict=False))
        if isinstance(parts[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(whole, parts[0].dtype, sharding=sharding)
        return jax.make_array_from_single_device_arrays(whole, sharding, parts)

    def pool(self, layout: KVLayout, num_blocks: int) -> KVCache:
        make = functools.partial(make_cache, self.pool_layout(layout), num_blocks)
        return jax.jit(make, out_shardings=self.by_head())()

    def everywhere(self, tree: Any) -> Any:
        return jax.device_put(tree, NamedSharding(self.mesh, EVERYWHERE))

    def by_head(self, memory_kind: str | None = None) -> jax.sharding.Sharding:
        return NamedSharding(self.mesh, BY_HEAD, memory_kind=memory_kind)

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
    """What `TensorParallel.jit` returns: specs follow from the arguments."""

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
            donate_argnums=_donated(self.donated),
            compiler_options=self.options,
        ).trace(*arguments)


def _step(size: int, most: int) -> int:
    return max(size // most, 1)


def _donated(index: int | None) -> tuple[int, ...]:
    return () if index is None else (index,)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _taken(x: Any, share: Share) -> Any:
    """Returns a part of a weight, or its shape."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda x: _taken(x, share), x)
    found = x[share.rows] if x.ndim == 1 else x[share.rows, share.columns]
    if not share.padding:
        return found
    return jnp.pad(found, ((0, share.padding), *((0, 0),) * (x.ndim - 1)))


# The placement of an engine that is told nothing.
ONE_DEVICE = Placement()


def place_on(num_devices: int) -> Placement:
    """Returns the placement on jax's first devices.

    Raises:
      ConfigError: there are fewer devices, or on a CPU too few threads for their sums.
    """
    if num_devices == 1:
        return ONE_DEVICE
    devices = jax.devices()
    if len(devices) < num_devices:
        hint = ""
        if devices[0].platform == "cpu":
            hint = (
                f"; the environment variable XLA_FLAGS=--xla_force_host_platform_device_count={num_devices} makes more"
            )
        raise ConfigError(
            f"tensor_parallel_size is {num_devices}, there are {len(devices)} devices ({devices[0].platform}){hint}"
        )
    if devices[0].platform == "cpu" and (threads := _threads(len(devices))) < THREADS_OF_DEVICE * num_devices:
        raise ConfigError(
            f"tensor_parallel_size is {num_devices}, and XLA has {threads} threads on this CPU: its devices wait for "
            f"each other in threads, and would do so for ever; set the environment variable NPROC="
            f"{THREADS_OF_DEVICE * num_devices}"
        )
    return TensorParallel(devices[:num_devices])


# XLA's threads on a CPU for each device: one waits in a sum, others compute what it waits for. With 8 and 9 threads for
# 8 devices sums never ended, with 10 they did (jaxlib 0.10.2, two cores).
THREADS_OF_DEVICE = 2


def _threads(num_devices: int) -> int:
    """Returns the threads of XLA's pool on a CPU (xla/pjrt/utils.cc, DefaultThreadPoolSize)."""
    given = next((int(n) for name in ("PJRT_NPROC", "NPROC") if (n := os.environ.get(name, "")).isdecimal()), None)
    return max(given or os.cpu_count() or 1, num_devices)
