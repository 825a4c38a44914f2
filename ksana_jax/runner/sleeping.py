"""A runner without device memory, its weights in host memory or nowhere. Programs stay."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from ksana_jax.devices.capabilities import capabilities
from ksana_jax.models.params import Params
from ksana_jax.runner.compiling import shape_of
from ksana_jax.runner.runner import Runner


@dataclasses.dataclass(frozen=True)
class _OnHost:
    """A weight in host memory, and where it was; None for one that the engine keeps there."""

    numbers: Any
    sharding: jax.sharding.Sharding | None

    @classmethod
    def of(cls, x: Any) -> _OnHost:
        if not isinstance(x, jax.Array):
            return cls(x, None)
        # A CPU's arrays are there already; NumPy's views of them would live until the next garbage collection.
        return cls(x if capabilities().shares_host_memory else np.asarray(x), x.sharding)

    def back(self) -> Any:
        return self.numbers if self.sharding is None else jax.device_put(self.numbers, self.sharding)


def on_host(runner: Runner) -> Any:
    """Returns a copy of a runner's weights in host memory, for `restore`; on a CPU, the weights themselves."""
    return jax.tree.map(_OnHost.of, runner.params)


def release(runner: Runner) -> None:
    """Frees weights and pool of an idle runner."""
    pool = runner.cache
    runner.params, runner.cache = jax.tree.map(shape_of, (runner.params, pool))
    if runner.evictor is not None:
        runner.evictor.forget()
    for leaf in jax.tree.leaves(pool):
        leaf.delete()


def restore(runner: Runner, kept: Any) -> None:
    """Gives a runner the weights of `on_host`, and an empty pool."""
    _wake(runner, jax.tree.map(_OnHost.back, kept))


def load(runner: Runner, params: Params, *, consume: bool) -> None:
    """Gives a runner weights of its model, and an empty pool. consume: the weights may be deleted."""
    _wake(runner, runner.weights(params, consume=consume))


def _wake(runner: Runner, params: Params) -> None:
    pool = runner.placement.pool(runner.layout, runner.cache.num_blocks)
    runner.params, runner.cache = params, pool
