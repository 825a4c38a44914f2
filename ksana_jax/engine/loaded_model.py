"""A model on an engine: loaded, changed between requests, closed."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import jax

from ksana_jax.core.compilation_cache import keep_compiled_steps
from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.core.gguf_file import parsing_once
from ksana_jax.core.request import SamplingParams
from ksana_jax.core.sources import compose, model_path
from ksana_jax.core.units import byte_size
from ksana_jax.devices.starting import use_device
from ksana_jax.engine.build import build_engine
from ksana_jax.engine.description import described
from ksana_jax.engine.distributed.replicas import Replica, Replicas, build_replicas
from ksana_jax.engine.engine import Engine
from ksana_jax.engine.llm_facts import LLMFacts
from ksana_jax.engine.settings import beyond_training, engine_config
from ksana_jax.engine.sleeping import Sleeps
from ksana_jax.engine.warmup import warm_up
from ksana_jax.kv.eviction import keep_statistics, read_eviction
from ksana_jax.loading.load import auto_dtype, open_model
from ksana_jax.loading.statistics import with_statistics
from ksana_jax.methods.presets import PatternLike, read_patterns
from ksana_jax.models.params import Params
from ksana_jax.runner.planner.process import resident_bytes
from ksana_jax.runner.runner import Runner
from ksana_jax.sharding.placement import Placement
from ksana_jax.tokenizers import Tokenizer, find_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from ksana_jax.engine.distributed.driver import Workers

logger = logging.getLogger("ksana_jax")


class LoadedModel(LLMFacts, Sleeps):
    """The part of `LLM` that loads its model, changes its settings and closes it; arguments as `LLM`."""

    # What __init__ takes besides the model, for the same engine with another setting.
    _given: Mapping[str, Any] = {}

    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        gguf_file: str | None = None,
        pattern: PatternLike | Seq[PatternLike] | None = None,
        load_format: Literal["auto", "dummy"] = "auto",
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        **settings: Any,
    ):
        if not isinstance(model, (str, os.PathLike)):
            raise ConfigError(f"model is of type {type(model).__name__}, must be a path or a name")
        given = {"pattern": pattern, "tokenizer": tokenizer, **settings}
        self._load(compose(model, revision, gguf_file), load_format, given)
        self._warn_beyond_training()

    def _load(self, model: str, load_format: str, given: Mapping[str, Any]) -> None:
        """Loads a model. given: what an LLM takes besides."""
        settings = dict(given)
        pattern, tokenizer, self._given = settings.pop("pattern"), settings.pop("tokenizer"), given
        config, workers = engine_config(settings), None
        if config.distributed is not None:
            from ksana_jax.engine.distributed.driver import SameCalls, Workers
            from ksana_jax.engine.distributed.worker import start

            job = start(config.distributed, config.device, (model, config))
            config = dataclasses.replace(config, distributed=dataclasses.asdict(job.setting))
            workers = (SameCalls if job.setting.spmd else Workers)(job, model, load_format)
        use_device(config.device)
        before = resident_bytes()
        self.name, model_dir = model, model_path(model, weights=load_format != "dummy")
        with parsing_once():
            if config.dtype == "auto":
                config = dataclasses.replace(config, dtype=auto_dtype(model_dir))
            config = with_statistics(config, model_dir, load_format)
            reads = load_format, config.seed, config.embedding_device, config.quantization
            opened = functools.partial(
                open_model, model_dir, config.dtype, *reads, num_devices=config.tensor_parallel_size
            )
            model_config, _ = opened()
            if isinstance(tokenizer, (str, os.PathLike)):
                tokenizer = load_tokenizer(tokenizer)
            elif tokenizer is None:
                tokenizer = find_tokenizer(model_dir)
            self._build(model_config, config, lambda at: opened(at)[1], pattern, tokenizer, before, workers)
        for engine in self.replicas.engines:
            engine.source = (self.name, load_format)

    @classmethod
    def from_params(cls, model_config, params: Params, *, pattern=None, tokenizer=None, **settings: Any) -> Self:
        """Creates an LLM from weights in memory. NumPy arrays are copied, arrays of jax are shared: once they are
        donated, as to a training step, requests raise RuntimeError until `update_weights` gives the new ones."""
        self = cls.__new__(cls)
        self.name, config = "from_params", engine_config(settings)
        if config.distributed is not None:
            raise ConfigError("distributed: weights in memory are those of one process; give LLM a model's directory")
        use_device(config.device)
        before, weights = resident_bytes(), sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        before = before and max(before - weights, 0)
        self._build(model_config.validate(), config, lambda at: params, pattern, tokenizer, before)
        self._warn_beyond_training()
        return self

    @classmethod
    def around(cls, engine: Engine) -> Self:
        """Wraps an engine from `build_engine` whose executor is a `Runner`."""
        self = cls.__new__(cls)
        self.name = "around"
        self._take(Replicas([Replica(engine)]), None)
        return self

    def _warn_beyond_training(self) -> None:
        if warning := beyond_training(self.engine.model, self.engine.max_model_len):
            warnings.warn(warning, stacklevel=3)  # at the caller of a constructor

    def _build(
        self,
        model: ModelConfig,
        config: EngineConfig,
        params: Callable[[Placement], Params | Callable[[], Params]],
        pattern: PatternLike | Seq[PatternLike] | None,
        tokenizer: Tokenizer | None,
        resident_before: int | None,
        workers: Workers | None = None,
    ) -> None:
        keep_compiled_steps()

        def build(placement: Placement) -> Engine:
            settings = {"patterns": pattern, "tokenizer": tokenizer, "workers": workers, "placement": placement}
            return build_engine(model, params(placement), config, **settings)

        self._take(build_replicas(config, build), resident_before)
        pool_bytes, layout = self.num_blocks * self.block_bytes, self.runner.layout
        blocks = f"{self.num_blocks:,} blocks of {self.config.block_size} tokens, {byte_size(pool_bytes)}"
        codes = "" if layout.sealed is None else " as codes, fewer with those that are kept exactly"
        logger.info("KV pool: %s; room for %s tokens%s", blocks, f"{pool_bytes // layout.token_bytes:,}", codes)

    def _take(self, replicas: Replicas, resident_before: int | None) -> None:
        self.replicas, engine = replicas, replicas.engines[0]
        self._serving = engine if len(replicas.replicas) == 1 else replicas
        assert isinstance(engine.executor, Runner) and engine.memory_plan is not None
        self.engine, self.config, self.tokenizer, self.runner = engine, engine.config, engine.tokenizer, engine.executor
        self.model_config, self.memory_plan = engine.model, engine.memory_plan
        self._resident_before = resident_before

    def close(self) -> None:
        """Writes cached prefixes to disk, if there is a disk tier, and unlocks its folder; other processes free their
        part of the engine.

        Raises:
          RuntimeError: requests are running.
        """
        if self.engine.memory.disk is not None:
            self.engine.flush()
            self.engine.memory.disk.close()
            if self.engine.memory.disk_states is not None:
                self.engine.memory.disk_states.close()
        if (workers := getattr(self.runner, "workers", None)) is not None:
            workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends running requests, and closes."""
        for engine in self.replicas.engines:
            for request_id in list(engine.requests):
                engine.abort(request_id)
        self.close()

    def __repr__(self) -> str:
        return f"LLM({described(self.name, self.engine, self.runner, self.replicas.num_requests)})"

    # ------------------------------------------------------------------ settings that change

    def set_pattern(self, pattern: PatternLike | Seq[PatternLike] | None) -> None:
        """Changes the attention pattern without loading or compiling anything; None takes the model's own.

        Layers stay in the groups of the pattern with which the engine was built, and a group keeps what any of its
        layers sees: if layers differ, an engine built with their patterns holds less.

        Raises:
          RuntimeError: requests are running.
          ValueError: the pattern has more repositioned sinks than `max_repositioned_sinks`.
        """
        patterns = read_patterns(pattern, self.model_config)
        self.runner.check_patterns(patterns)
        self.replicas.each(lambda engine: engine.set_patterns(patterns))
        self._given = {**self._given, "pattern": pattern}

    def set_kv_eviction(self, setting: Mapping[str, Any] | None) -> None:
        """Changes the eviction method.

        Other numbers of the same method, such as the budget, load and compile nothing. For another method, or None, the
        engine is built again, without cached prefixes; it reads the weights, compiles, and logs so.

        Args:
          setting: as `EngineConfig.kv_eviction`.

        Raises:
          RuntimeError: requests are running.
          ConfigError: the setting is wrong, or the engine cannot be built again; the method stays as it is.
        """
        setting, layout = keep_statistics(setting, self.config.kv_eviction), self.engine.scheduler.layout
        method, now = read_eviction(setting), layout.eviction and layout.eviction.method
        if method is not None and layout.compiled_for(method.encoded(self.tokenizer)):
            self.replicas.each(lambda engine: engine.set_eviction(method))
        elif method is not None or now is not None:
            self._rebuild(setting, f"kv_eviction changes from {now} to {method}")

    def _rebuild(self, kv_eviction: Mapping[str, Any] | None, change: str) -> None:
        self.replicas.each(lambda engine: engine.check_idle("the eviction method changes only in between"))
        if (source := self.engine.source) is None or self.engine.memory.disk is not None:
            why = "the weights were given in memory" if source is None else "disk_cache_dir is set"
            raise ConfigError(f"{change}, and {why}: make an engine for it")
        logger.info("%s: reading the weights again; steps are compiled", change)
        self.sleep(2)
        try:
            self._load(*source, {**self._given, "kv_eviction": kv_eviction})
        except BaseException:
            self.wake_up()
            raise

    def warm_up(
        self,
        max_len: int | None = None,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        in_background: bool = False,
    ) -> int:
        """Compiles every step that sequences of up to max_len tokens can need; returns the number of new functions.

        Args:
          sampling_params: parameters of later requests, in any mixture; plain greedy sampling is always included.
          in_background: on a CPU, compile what a first chat needs, and the rest in a background thread, with masks of
            grammars last.
        """
        before = self.num_compilations
        asked = [sampling_params] if isinstance(sampling_params, SamplingParams) else list(sampling_params or ())
        for replica in self.replicas.replicas:
            with replica.on_device():
                warm_up(replica, max_len, asked, in_background)
        for name, compared in self.memory_usage().items():
            logger.info("memory of %s: %s", name, compared)
        return self.num_compilations - before
