"""A proposer that knows how texts go on, as far as a test has told it, and drafts what a test wants of that."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ksana_jax.scheduler.speculative.base import Proposer, ProposerContext, SpeculativeMethod, Texts
from ksana_jax.scheduler.step.drafts import Drafts
from tests.fake_network import VOCAB

GUESSES = ("right", "wrong", "random", "right at first", "stops", "nothing", "raises", "nonsense")
# Prompt -> what follows it, one for each completion.
ANSWERS: dict[bytes, list[list[int]]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guessing(SpeculativeMethod):
    """Drafts as many tokens as it may, or fewer if they are not all right.

    Args:
      guesses: one of GUESSES: "right at first" goes wrong somewhere, "stops" has ids that end a text in it.
      stop_ids: those ids. vocab_size: of the model. seed: of what is random.
      trees: whether each draft is made a tree: beside its tokens it has others, in any order that a tree allows.
    """

    guesses: str = "right"
    stop_ids: tuple[int, ...] = (0,)
    vocab_size: int = VOCAB
    seed: int = 0
    trees: bool = False

    @property
    def draws_trees(self) -> bool:
        return self.trees

    def proposer(self, context: ProposerContext) -> Any:
        return Guesser(self)


class Guesser(Proposer):
    """See `Guessing`. began, ended: what it was told of."""

    def __init__(self, method: Guessing):
        self.method, self.rng = method, np.random.default_rng(method.seed)
        self.prompts: dict[int, np.ndarray] = {}
        self.num_ends = 0

    def begin(self, row: int, token_ids: np.ndarray, num_prompt: int, salt: str) -> None:
        assert row not in self.prompts, "a text has entered a row that another one has not left"
        self.prompts[row] = token_ids[:num_prompt].copy()

    def end(self, row: int, token_ids: np.ndarray, completed: bool) -> None:
        prompt = self.prompts.pop(row)
        assert np.array_equal(token_ids[: len(prompt)], prompt)
        self.num_ends += 1

    def propose(self, texts: Texts, rows: np.ndarray, most: np.ndarray) -> Drafts:
        kind, vocab = self.method.guesses, self.method.vocab_size
        if kind == "raises" and self.rng.random() < 0.5:
            raise RuntimeError("no guess today")
        ids = self.rng.integers(0, vocab, (len(rows), int(most.max(initial=1)))).astype(np.int32)
        if kind == "nonsense":
            return Drafts(ids + vocab, most.astype(np.int32))
        for place, row in enumerate(rows.tolist()):
            following = self._following(texts, row)[: most[place]]
            if kind not in ("random", "nothing"):
                ids[place, : len(following)] = following
            if kind == "wrong":
                ids[place] = (ids[place] + 1) % vocab
            if kind == "right at first":
                at = self.rng.integers(0, ids.shape[1])
                ids[place, at] = (ids[place, at] + 1) % vocab
            if kind == "stops" and self.rng.random() < 0.5:
                ids[place, self.rng.integers(0, ids.shape[1])] = self.rng.choice(self.method.stop_ids)
        if self.method.trees and kind not in ("nothing", "raises"):
            return self._planted(ids, most)
        counts = most if kind == "right" or self.rng.random() < 0.7 else self.rng.integers(0, most + 1)
        return Drafts(ids, np.zeros_like(most) if kind == "nothing" else counts)

    def _planted(self, ids: np.ndarray, most: np.ndarray) -> Drafts:
        """Puts the tokens of a draft into a tree, among others that are random, or that it has elsewhere."""
        planted, counts = np.zeros_like(ids), np.zeros(len(ids), np.int32)
        parents = np.full(ids.shape, -1, np.int32)
        for row, (draft, room) in enumerate(zip(ids.tolist(), most.tolist(), strict=True)):
            last, taken = -1, 0
            for node in range(int(self.rng.integers(0, room + 1)) if self.rng.random() < 0.2 else room):
                if self.rng.random() < 0.5:  # the draft goes on
                    planted[row, node], parents[row, node] = draft[taken], last
                    last, taken = node, taken + 1
                else:
                    parents[row, node] = self.rng.integers(-1, node)
                    planted[row, node] = self.rng.choice([self.rng.integers(self.method.vocab_size), *draft])
                counts[row] = node + 1
        return Drafts(planted, counts, parents=parents)

    def _following(self, texts: Texts, row: int) -> list[int]:
        prompt = self.prompts[row]
        text = texts.token_ids[row, : texts.lengths[row]]
        assert np.array_equal(text[: len(prompt)], prompt), "a row holds another text than the one that has entered"
        output = text[len(prompt) :].tolist()
        for answer in ANSWERS.get(prompt.tobytes(), ()):
            if answer[: len(output)] == output:
                return answer[len(output) :]
        return []
