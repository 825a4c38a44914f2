"""Changes of an idle engine: its attention patterns, the numbers of its eviction method, cached prefixes to disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.engine.engine_lock import EngineLock
from ksana_jax.engine.steps import StepLoop
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.kv.flushing import flush
from ksana_jax.kv.model_layout import with_heads_apart
from ksana_jax.scheduler.step.per_token import numbering
from ksana_jax.tokenizers import Tokenizer


class IdleChanges(StepLoop):
    """The part of `Engine` that changes it while no request runs."""

    lock: EngineLock
    requests: dict[str, Any]
    tokenizer: Tokenizer | None
    model: ModelConfig

    def check_idle(self, otherwise: str) -> None:
        """Raises RuntimeError while requests are running; otherwise: what the message adds."""
        if self.has_work:
            raise RuntimeError(f"{len(self.requests)} requests are running: {otherwise}")

    def set_patterns(self, patterns: Seq[AttentionPattern]) -> None:
        """Changes the attention pattern of each layer.

        Raises:
          RuntimeError: requests are running.
          ValueError: the executor cannot serve these patterns.
        """
        self.lock.run(self._set_patterns, patterns)

    def _set_patterns(self, patterns: Seq[AttentionPattern]) -> None:
        self.check_idle("the pattern changes only in between")
        patterns = with_heads_apart(patterns, self.model, read_eviction(self.config.kv_eviction))
        layout = self.scheduler.layout.with_patterns(patterns)  # may refuse, which changes nothing
        self.lock.begin_write()
        self.executor.set_patterns(patterns)
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.proposer.set_patterns(patterns)
        self.scheduler.set_layout(layout, self.memory.index.scope.seen_through(patterns))

    def set_eviction(self, method: EvictionMethod) -> None:
        """Changes the numbers of the eviction method.

        Raises:
          RuntimeError: requests are running.
          ConfigError: see `KVLayout.with_eviction`.
        """
        self.lock.run(self._set_eviction, method)

    def _set_eviction(self, method: EvictionMethod) -> None:
        self.check_idle("the eviction method changes only in between")
        layout = self.scheduler.layout.with_eviction(method.encoded(self.tokenizer))
        self.lock.begin_write()
        additions = {**self.builder.additions, **numbering(layout.numbers_queries)}
        self.builder = dataclasses.replace(self.builder, additions=additions)
        self.scheduler.set_layout(layout)

    def flush(self) -> None:
        """Writes cached prefixes to disk, if there is a disk tier; raises RuntimeError while requests are running."""
        self.lock.run(self._flush)

    def _flush(self) -> None:
        self.check_idle("prefixes are written to the disk only in between")
        self.lock.begin_write()
        self.make_moves()
        for _ in flush(self.memory):
            self.make_moves()
