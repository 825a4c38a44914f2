"""Recall examples as training sequences, mixed into batches of text, and as held-out questions. NumPy only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.training.batches import IGNORED
from experiments.training.tokenizer import BOS_ID, EOS_ID
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.recall import Example, make_example

# Kinds of examples and their options. The published stream, 20 lines back, is longer than small contexts.
KINDS: dict[str, dict[str, Any]] = {
    "passkey": {},
    "needle": {},
    "key_value": {},
    "multi_query": {},
    "variable_tracking": {},
    "stream_eval": {"distance": 4, "every": 3},
}
_HELD_OUT = 2**32  # seeds of examples: training takes those below


class RecallMix:
    """Replaces a fraction of each batch's sequences by recall examples; which and by what depends on seed and step.

    Args:
      encode: converts text to ids, without the beginning-of-text token.
      context: tokens of a sequence. bos: whether sequences begin with the beginning-of-text token.

    Raises:
      ConfigError: half a context is too short for a kind of example.
    """

    def __init__(self, encode: Callable[[str], list[int]], *, context: int, bos: bool, fraction: float, seed: int):
        self._encode, self._context, self._bos = encode, context, bos
        self._fraction, self._seed = fraction, seed
        for kind in KINDS:
            self._example(kind, context // 2, _HELD_OUT)

    def mixed(self, step: int, inputs: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns a step's inputs and targets [batch, context] with some of its sequences replaced."""
        rng = np.random.default_rng([self._seed, step, 1])  # the third number keeps it apart from the epochs' shuffles
        inputs, targets = inputs.copy(), targets.copy()
        for row in np.flatnonzero(rng.random(len(inputs)) < self._fraction):
            inputs[row], targets[row] = self._sequence(rng)
        return inputs, targets

    def _sequence(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Fills a sequence with examples of several lengths, each followed by the end-of-text token."""
        ids = [BOS_ID] * self._bos
        while (room := self._context - len(ids)) > 0:
            kind, seed = rng.choice(list(KINDS)), int(rng.integers(_HELD_OUT))
            try:
                example = self._example(kind, int(rng.integers(room // 2, room + 1)), seed)
            except ConfigError:  # too little room is left
                break
            ids += [*self._encode(example.text), EOS_ID]
        row = np.array(ids[: self._context + 1], np.int32)
        inputs, targets = _empty(self._context)
        inputs[: len(row) - 1], targets[: len(row) - 1] = row[:-1], row[1:]
        targets[inputs == EOS_ID] = IGNORED
        return inputs, targets

    def held_out(self, count: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Returns inputs and targets [count, context] by kind, of examples that training does not see; only the answers
        are targets. Each example fills the context."""
        found = {}
        for kind in KINDS:
            rows = [self._question(kind, _HELD_OUT + index) for index in range(count)]
            inputs, targets = zip(*rows, strict=True)
            found[kind] = np.stack(inputs), np.stack(targets)
        return found

    def _question(self, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
        example = self._example(kind, self._context - self._bos, seed)
        prompt, answer = [BOS_ID] * self._bos + example.prompt_ids, example.answer_ids
        inputs, targets = _empty(self._context)
        end = len(prompt) + len(answer)
        inputs[:end] = prompt + answer
        targets[len(prompt) - 1 : end - 1] = answer
        return inputs, targets

    def _example(self, kind: str, num_tokens: int, seed: int) -> Example:
        return make_example(kind, self._encode, num_tokens=num_tokens, seed=seed, **KINDS[kind])


def _empty(context: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(context, EOS_ID, np.int32), np.full(context, IGNORED, np.int32)
