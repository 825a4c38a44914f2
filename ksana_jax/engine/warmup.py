"""Compiles ahead of time what the requests of an engine can need: before them, or in a background thread."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from ksana_jax.core.processor import num_cores
from ksana_jax.core.request import SamplingParams
from ksana_jax.devices.tuning import tuning
from ksana_jax.engine.distributed.replicas import Replica
from ksana_jax.engine.engine import Engine
from ksana_jax.runner.keys import keys_for
from ksana_jax.runner.step_runs import compiled_programs
from ksana_jax.runner.stored_program import StoredProgram
from ksana_jax.scheduler.step.buckets import Buckets
from ksana_jax.scheduler.step.ladders import plain_shapes, stages, verification_shapes

# Seconds for which a program waits until no request runs: compiling takes a core from steps.
PATIENCE_S = 5.0
# Tokens of a first prompt, with its template.
CHAT_TOKENS = 64

logger = logging.getLogger("ksana_jax")


def warm_up(replica: Replica, max_len: int | None, asked: Seq[SamplingParams], in_background: bool) -> None:
    """Compiles every step that sequences of up to max_len tokens can need; see `LLM.warm_up`."""
    engine, larger, masked = replica.engine, [], []
    runner: Any = engine.executor
    config, buckets = engine.config, engine.builder.buckets
    width = engine.scheduler.layout.table_width(max_len or engine.max_model_len, config.max_num_batched_tokens)
    # XLA:CPU takes 200 MB for a program, which a planned memory has once.
    at_once = tuning(runner.platform).compiles_on_one_core and config.memory_fraction is None
    workers = num_cores() if at_once else 1
    loops = {1} if runner.chooses_in_step else set()
    if config.num_scheduler_steps > 1 and not runner.embeds_on_host:
        loops.add(config.num_scheduler_steps)
    every, speculation, rule = buckets, engine.scheduler.speculation, engine.builder.acceptance
    if in_background:  # masks come last: many engines never meet a grammar
        masked = [p for p in asked if p.structured_outputs is not None]
        asked = [p for p in asked if p.structured_outputs is None]
    drawn = () if speculation is None else speculation.proposer.drawn_shapes

    def keys_of(buckets: Buckets, asked: Seq[SamplingParams] = asked) -> list[Any]:
        shapes, verifying = plain_shapes(buckets, width), verification_shapes(buckets, width)
        of_drafts = verifying, rule, drawn, engine.model.recurrent is not None
        return keys_for(shapes, buckets.decodes, asked, loops, engine.model.vocab_size, *of_drafts)

    simple = not loops and speculation is None and config.distributed is None
    if in_background and at_once and simple and runner.missing(keys_of(buckets)):
        buckets, *larger = stages(buckets)
        _take(engine, buckets)
    widest = max(shape.table_width for shape in plain_shapes(buckets, width))
    moves = engine.memory.host is not None or any(p.num_sequences > 1 for p in asked)
    runner.compile(keys_of(buckets), workers, table_width=widest, moves=moves)
    if speculation is not None:
        speculation.proposer.warm_up(widest, any(not p.greedy for p in asked), workers)
    if in_background and not larger:
        chat = [buckets.shape(1, (), 1), buckets.shape(0, (min(CHAT_TOKENS, config.max_num_batched_tokens),), 1)]
        _load(runner.programs, keys_for(chat, buckets.decodes[:1], asked, loops, engine.model.vocab_size))
    left, known = [], {*runner.programs}
    stages_left = [(each, keys_of(each)) for each in larger]
    if masked and config.distributed is None:
        stages_left.append((every, keys_of(every, [*asked, *masked])))
    for each, keys in stages_left:
        left.append((each, [key for key in keys if key not in known]))
        known.update(keys)
    if left:
        _BackgroundCompiler(replica, left).start()


def _load(programs: Mapping[Any, Any], keys: Seq[Any]) -> None:
    """Loads programs that are of the store, which their first call would do."""
    for key in keys:
        for program in compiled_programs(programs[key]):
            if isinstance(program, StoredProgram):
                program.load()


class _BackgroundCompiler(threading.Thread):
    """Compiles programs while requests are served, whose steps take larger ones until all of a stage are there.

    Args:
      replica: ends the thread when it is dropped. left: of each stage of `ladders.stages` the keys of programs.
    """

    def __init__(self, replica: Replica, left: Seq[tuple[Buckets, Seq[Any]]]):
        super().__init__(name="ksana-compile", daemon=True)
        self._replica, self._left, self._stopping = weakref.ref(replica), left, threading.Event()
        replica.engine.num_compiling = len({key for _, keys in left for key in keys})
        atexit.register(self._stop_first)

    def _stop_first(self) -> None:
        """Waits for the program that is compiled: the process must not end while XLA is running."""
        self._stopping.set()
        self.join()

    def run(self) -> None:
        try:
            for buckets, keys in self._left:
                for key in keys:
                    self._with_engine(_compile, key)
                self._with_engine(_take, buckets)
        except Exception as error:  # any of XLA's, too
            logger.error("steps take larger shapes, as one is not compiled: %s: %s", type(error).__name__, error)
            self._with_engine(setattr, "num_compiling", 0)
        atexit.unregister(self._stop_first)

    def _with_engine(self, function: Callable[..., None], *given: Any) -> None:
        if not self._stopping.is_set() and (replica := self._replica()) is not None:
            with replica.on_device() as engine:
                function(engine, *given)


def _compile(engine: Engine, key: Any) -> None:
    runner: Any = engine.executor
    until = time.monotonic() + PATIENCE_S
    while engine.has_work and time.monotonic() < until:
        time.sleep(0.05)
    if key not in runner.programs:
        runner.compile([key])
        engine.num_compiling -= 1


def _take(engine: Engine, buckets: Buckets) -> None:
    engine.lock.run(lambda: setattr(engine, "builder", dataclasses.replace(engine.builder, buckets=buckets)))
