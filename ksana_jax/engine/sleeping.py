"""Sleep: an idle engine gives its device memory back, and wakes up with the same weights or with others.

Compiled programs, settings, and prefixes in the host and disk tiers stay.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.sources import model_path
from ksana_jax.engine.distributed.replicas import Replicas
from ksana_jax.engine.engine import Engine
from ksana_jax.kv.flushing import FLUSHED_AT_ONCE
from ksana_jax.kv.prefix_index import Scope
from ksana_jax.loading.load import abstract_params, open_model
from ksana_jax.models.params import Params
from ksana_jax.runner import sleeping
from ksana_jax.runner.planner.engine import PoolPlan
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.speculative import read_speculative

# 1 keeps the weights in host memory, 2 drops them.
LEVELS = (1, 2)
# A model, by path or name, or weights in memory.
Weights = str | os.PathLike[str] | Params


class Asleep(NamedTuple):
    """level: of `LEVELS`. kept: the weights in host memory, or None."""

    level: int
    kept: Any


class Sleeps:
    """The part of `LLM` that frees its memory and takes other weights.

    Attributes:
      wake_s: seconds that the last `wake_up` took; 0 before the first.
    """

    memory_plan: PoolPlan
    replicas: Replicas
    wake_s = 0.0

    def sleep(self, level: int = 1) -> None:
        """Frees the device's memory: prefixes move to the host tier as far as it has room, others are dropped.
        Compiled programs stay; requests are refused until `wake_up`.

        Args:
          level: 1 keeps the weights in host memory, which on a CPU frees the pool alone; 2 drops them.

        Raises:
          RuntimeError: requests are running. ConfigError: this engine cannot sleep; the message says why.
        """
        self.replicas.each(lambda engine: _fall_asleep(engine, level))

    def wake_up(self) -> None:
        """Wakes up with the weights it slept with, which are read again after `sleep(2)`; awake, does nothing.

        Raises:
          ConfigError: the weights were given in memory and dropped.
        """
        began, slept = time.perf_counter(), self.is_sleeping
        self.replicas.each(lambda engine: engine.lock.run(_wake, engine))
        if slept:
            self.wake_s = time.perf_counter() - began

    @property
    def is_sleeping(self) -> bool:
        return self.replicas.engines[0].asleep is not None

    def update_weights(self, weights: Weights) -> None:
        """Takes other weights of the same model, as after a step of training, awake or asleep; compiles nothing.
        Cached prefixes are dropped, and adapters are read again.

        Args:
          weights: path or name of a model, or weights as of `loading.load_model`, taken as by `LLM.from_params`.

        Raises:
          RuntimeError: requests are running. ValueError: the weights do not fit, and the old ones stay; or they cannot
            be read, and the engine sleeps.
        """
        self.replicas.each(lambda engine: _update(engine, weights))


def _fall_asleep(engine: Engine, level: int) -> None:
    checks.require(checks.one_of("level", level, LEVELS))
    check(engine)
    engine.lock.run(_sleep, engine, level)


def _update(engine: Engine, weights: Weights) -> None:
    check(engine)
    if engine.memory.disk is not None:
        raise ConfigError("disk_cache_dir is set, and its folder holds prefixes of one model's weights")
    engine.lock.run(_replace, engine, _checked(engine, weights))


def check(engine: Engine) -> None:
    """Checks that an engine can sleep.

    Raises:
      ConfigError: it cannot; the message says why.
    """
    config, problem = engine.config, None
    if engine.read_weights is None or not isinstance(engine.executor, Runner):
        problem = "it was not built from weights"
    elif config.distributed is not None:
        problem = "distributed is set, and each process has its own memory"
    elif (method := read_speculative(config.speculative_config)) is not None and method.has_model:
        problem = "it has a draft model, which would stay awake"
    if problem is not None:
        raise ConfigError(f"this engine cannot sleep: {problem}")


class CheckedWeights(NamedTuple):
    """Weights that fit an engine, or a function that reads them. source: as `Engine.source`."""

    weights: Params | Callable[[], Params]
    source: tuple[str, str] | None


def _checked(engine: Engine, weights: Weights) -> CheckedWeights:
    """Checks that weights fit the engine.

    Raises:
      ConfigError: they do not; the message says where.
      LoadError: the model cannot be read.
    """
    config = engine.config
    if isinstance(weights, Params):
        wanted = abstract_params(engine.model, config.dtype, "stored" if config.quantization == "stored" else None)
        if problem := _difference(weights, wanted):
            raise ConfigError(f"the weights do not fit this engine: {problem}")
        return CheckedWeights(weights, None)
    if not isinstance(weights, (str, os.PathLike)):
        raise ConfigError(f"weights is of type {type(weights).__name__}, must be a path, a name or Params")
    return _opened(engine, (os.fspath(weights), "auto"))


def _opened(engine: Engine, source: tuple[str, str]) -> CheckedWeights:
    """Opens a model whose weights the engine takes; raises like `_checked`."""
    config, (name, load_format) = engine.config, source
    reads: Any = load_format, config.seed, config.embedding_device, config.quantization
    path, placement = model_path(name, weights=load_format != "dummy"), _runner(engine).placement
    on = {"placement": placement, "num_devices": config.tensor_parallel_size}
    model, read = open_model(path, config.dtype, *reads, **on)
    if model != engine.model:
        names = [f.name for f in dataclasses.fields(model) if getattr(model, f.name) != getattr(engine.model, f.name)]
        raise ConfigError(f"model {name!r} does not fit this engine: it differs in {', '.join(names)}")
    return CheckedWeights(read, source)


def _difference(weights: Params, wanted: Params) -> str | None:
    """Returns where weights have another structure, shape or dtype than is wanted; None if they fit."""
    both = [{jax.tree_util.keystr(p): x for p, x in jax.tree.leaves_with_path(tree)} for tree in (weights, wanted)]
    for name in sorted(both[0].keys() | both[1].keys()):
        given, asked = (f"{list(tree[name].shape)} {tree[name].dtype}" if name in tree else "none" for tree in both)
        if given != asked:
            return f"{name} is {given}, must be {asked}"
    return None


def _sleep(engine: Engine, level: int) -> None:
    if engine.asleep is None:
        engine.check_idle("an engine sleeps only in between")
        engine.lock.begin_write()
        engine.make_moves()
        _vacate(engine)
        # First, so that an interrupt from here on leaves an engine that sleeps and can wake up.
        engine.asleep = Asleep(level, sleeping.on_host(_runner(engine)) if level == 1 else None)
        sleeping.release(_runner(engine))
    elif level > engine.asleep.level:
        engine.asleep = Asleep(level, None)


def _vacate(engine: Engine) -> None:
    """Takes all blocks and states from the prefix cache; the host tier receives as many as it has room for."""
    states = engine.memory.states
    for device in (engine.memory.device, *([] if states is None else [states])):
        while (pool := device.pool).num_free < pool.num_blocks:
            device.release(device.allocate(min(pool.num_free + FLUSHED_AT_ONCE, pool.num_blocks)))
            engine.make_moves()


def _replace(engine: Engine, new: CheckedWeights) -> None:
    """Drops weights and prefixes, then loads other weights: two sets may not fit."""
    if engine.asleep is None:
        engine.check_idle("weights change only in between")
        engine.lock.begin_write()
        _forget_prefixes(engine, engine.memory.index.scope)
        engine.asleep = Asleep(2, None)
        sleeping.release(_runner(engine))
    _load(engine, new)


def _forget_prefixes(engine: Engine, scope: Scope) -> None:
    runner = _runner(engine)
    engine.scheduler.reset(engine.scheduler.layout, scope, runner.host_blocks, runner.host_states)


def _wake(engine: Engine) -> None:
    if engine.asleep is None:
        return
    if engine.asleep.level == 2:
        if engine.source is None:
            raise ConfigError("the weights were given in memory, and sleep(2) has dropped them: call update_weights")
        return _load(engine, _opened(engine, engine.source))
    sleeping.restore(_runner(engine), engine.asleep.kept)
    engine.asleep = None


def _load(engine: Engine, new: CheckedWeights) -> None:
    assert engine.read_weights is not None
    params, digest = engine.read_weights(new.weights)
    sleeping.load(_runner(engine), params, consume=callable(new.weights))
    engine.lock.begin_write()
    if engine.factory.adapters is not None:
        engine.factory.adapters.forget()
    if digest != (scope := engine.memory.index.scope).model:
        _forget_prefixes(engine, dataclasses.replace(scope, model=digest))
    engine.asleep, engine.source = None, new.source


def _runner(engine: Engine) -> Runner:
    assert isinstance(engine.executor, Runner)
    return engine.executor
