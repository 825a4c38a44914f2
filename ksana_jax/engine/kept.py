"""Which tokens of a sequence each layer and KV head has kept. Reads positions that the pool stores; no jax."""

from __future__ import annotations

import numpy as np

from ksana_jax.core.config import ConfigError
from ksana_jax.engine.completion import Completion
from ksana_jax.engine.engine import Engine
from ksana_jax.engine.steps import Step
from ksana_jax.kv.layout import HIDDEN, TEXT_POSITION
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.step.types import StepInput


class KeptTokens:
    """Fills in `CompletionOutput.kept_tokens` for completions that have ended or are streamed."""

    def __init__(self, engine: Engine):
        if not isinstance(engine.executor, Runner):
            raise ConfigError("kept_tokens needs an engine that computes a model; this one does not")
        self._engine, self._runner = engine, engine.executor

    def __call__(self, step: Step, rows_of: dict[Completion, int]) -> None:
        """Inspects a step; see `Engine.inspectors`."""
        end_of = dict(zip(step.batch.rows.tolist(), step.ends.tolist(), strict=True))
        for completion, row in rows_of.items():
            seq, request = completion.seq, completion.seq.owner
            streams = getattr(completion, "streams", False)
            if row not in end_of or request.beams is not None or not (streams or seq.finish_reason is not None):
                continue
            known = seq.num_prompt + len(completion.token_ids) if seq.finish_reason is None else len(seq.token_ids)
            if known > seq.num_prompt:  # a token was sampled: all before it are computed
                completion.kept_tokens = self.of(step.input, end_of[row], known - 1)

    def of(self, step: StepInput, end: int, num_tokens: int) -> np.ndarray:
        """Returns which of a sequence's first tokens the last of them attends to, after the step that computed it and
        before any other: bool [L, K, num_tokens].

        Args:
          end: index in the step's tokens of the row's last one.
        """
        runner, layout, arrays = self._runner, self._engine.scheduler.layout, step.arrays
        (first, tile), size = _tile_of(step, end), layout.block_size
        found = np.zeros((len(layout.places), layout.num_kv_heads, num_tokens), bool)
        stored: dict[int, np.ndarray] = {}
        for place, (group, at) in enumerate(layout.places):
            if (method := layout.evicts_from[place]) is None:
                found[place] = runner.patterns[place].visible(num_tokens - 1, np.arange(num_tokens))
                continue
            if group not in stored:
                leaf = runner.cache.leaves[HIDDEN if method.hides else TEXT_POSITION]
                stored[group] = np.asarray(leaf[arrays.block_tables[group, tile]])[:, :, 0]  # [P, Lg, K, B]
            num_evicted = int(arrays.positions[first] - arrays.cache_positions[group, first])
            slots = (arrays.block_starts[group, tile][:, None] + np.arange(size)).reshape(-1)
            used, of_slots = slots < num_tokens - num_evicted, np.moveaxis(stored[group][:, at], 0, 1)
            of_slots = of_slots.reshape(len(of_slots), -1)[:, used]  # [K, slots]
            if method.hides:
                found[place][:, slots[used]] = ~of_slots
            else:
                np.put_along_axis(found[place], of_slots, True, axis=1)
        return found.reshape(len(runner.config.layers), -1, num_tokens)


def _tile_of(step: StepInput, token: int) -> tuple[int, int]:
    """Returns the first token of a token's tile, and the tile."""
    for part, tokens, tiles in step.shape.places():
        if token < tokens.stop:
            nth = (token - tokens.start) // part.width
            return tokens.start + nth * part.width, tiles.start + nth
    raise IndexError(f"the step has {step.shape.num_tokens} tokens, not {token + 1}")
