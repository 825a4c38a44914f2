"""Tokens of a sequence that each layer and KV head has kept, from positions that the pool stores. No jax."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ksana_jax.core.config import ConfigError
from ksana_jax.engine.completion import Completion
from ksana_jax.engine.engine import Engine
from ksana_jax.engine.steps import Step
from ksana_jax.kv.layout import HIDDEN, TEXT_POSITION
from ksana_jax.runner.recording import step_recorder
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.step.types import StepInput


class KeptTokens:
    """Fills in `CompletionOutput.kept_tokens` for completions that have ended or are streamed."""

    def __init__(self, engine: Engine):
        if not isinstance(engine.executor, Runner):
            raise ConfigError("kept_tokens needs an engine that computes a model; this one does not")
        eviction = engine.scheduler.layout.eviction
        if eviction is not None and eviction.method.low_codec:
            raise ConfigError("kept_tokens needs one token in each slot; kv_eviction keeps several in fewer bits")
        self._engine, self._runner = engine, engine.executor
        selects = engine.scheduler.layout.selects_in
        self._recorder = step_recorder(engine.executor, [layer for layer, method in enumerate(selects) if method])

    def __call__(self, step: Step, rows_of: dict[Completion, int]) -> None:
        """Inspects a step; see `Engine.inspectors`."""
        end_of = dict(zip(step.batch.rows.tolist(), step.ends.tolist(), strict=True))
        for completion, row in rows_of.items():
            seq, ended = completion.seq, completion.seq.finish_reason is not None
            if row not in end_of or seq.owner.beams is not None or not (ended or getattr(completion, "streams", False)):
                continue
            known = len(seq.token_ids) if ended else seq.num_prompt + len(completion.token_ids)
            if known > seq.num_prompt:  # a token was sampled: all before it are computed
                completion.kept_tokens = self.of(step.input, end_of[row], known - 1)

    def of(self, step: StepInput, end: int, num_tokens: int) -> np.ndarray:
        """Returns which of a sequence's first tokens the last of them attends to, after the step that computed it and
        before any other: bool [L, K, num_tokens].

        Args:
          end: index in the step's tokens of the row's last one.
        """
        runner, layout, arrays = self._runner, self._engine.scheduler.layout, step.arrays
        tile, recorded = Tile.of(step, end), functools.cache(lambda: self._recorder(step))
        found = np.zeros((len(layout.places), layout.num_kv_heads, num_tokens), bool)
        stored = functools.cache(functools.partial(tile.stored, runner))
        for place, (group, at) in enumerate(layout.places):
            cached = (arrays.block_starts[group, tile.index][:, None] + np.arange(layout.block_size)).reshape(-1)
            num_evicted = tile.begin - arrays.cache_positions[group, tile.first]
            used = cached < num_tokens - num_evicted  # slots of the table
            if layout.selects_in[place] is not None:
                [(weights, _)] = recorded().weights[place][tile.part]
                newest = np.asarray(weights)[tile.nth, num_tokens - 1 - tile.begin]
                read = newest.reshape(found.shape[1], -1, len(cached)).max(axis=1) >= 0
                found[place][:, cached[used]] = read[:, used]
            elif (method := layout.evicts_from[place]) is None:
                found[place] = runner.patterns[place].visible(num_tokens - 1, np.arange(num_tokens))
            elif method.hides:
                found[place][:, cached[used]] = ~stored(HIDDEN, group)[at][:, used]
            else:
                np.put_along_axis(found[place], stored(TEXT_POSITION, group)[at][:, used], True, axis=1)
        return found.reshape(len(runner.config.layers), -1, num_tokens)


class Tile(NamedTuple):
    """A tile of a step. part: of the step. nth: in the part. index: in the step. first: its first token, which is at
    sequence position begin."""

    step: StepInput
    part: int
    nth: int
    index: int
    first: int
    begin: int

    @classmethod
    def of(cls, step: StepInput, token: int) -> Tile:
        """Returns the tile of a token."""
        places = enumerate(step.shape.places())
        number, (part, tokens, tiles) = next(place for place in places if token < place[1][1].stop)
        nth = (token - tokens.start) // part.width
        first = tokens.start + nth * part.width
        return cls(step, number, nth, tiles.start + nth, first, int(step.arrays.positions[first]))

    def stored(self, runner: Runner, name: str, group: int) -> np.ndarray:
        """Returns what the slots of its table hold in a leaf of `kv.layout.OF_TOKENS`: [Lg, K, C]."""
        leaf = np.asarray(runner.cache.leaves[name][self.step.arrays.block_tables[group, self.index]])[:, :, 0]
        return np.moveaxis(leaf, 0, 2).reshape(*leaf.shape[1:3], -1)
