"""Lookahead decoding: drafts n-grams that the model itself has generated in parallel, by Jacobi iterations.

A step's tree has two kinds of branches. The lookahead branch is a window of W places, with the guesses of N - 1 earlier
steps one after the other from each place on; the model's outputs after them complete n-grams and become the newest
guesses. The verification branch has n-grams that begin with the row's newest token. Both are drafts: where guesses have
come true, they are accepted.

Source: Lookahead decoding, Fu et al., arXiv:2402.02057, section 3.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.methods.proposers.draft_tree import AFTER_TEXT, DraftTree, drafts_of
from ksana_jax.scheduler.speculative.base import Proposer, ProposerContext, SpeculativeMethod, Texts
from ksana_jax.scheduler.step.drafts import Drafts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jacobi(SpeculativeMethod):
    """Drafts without another model: a step computes guesses for W places ahead, and verifies n-grams of earlier ones.

    Args:
      window_size: W, places ahead of the sequence, the newest token's included.
      ngram_size: N, tokens of an n-gram, its first one included.
      guess_set_size: G, newest n-grams that are kept for each first token.
      pool_from_prompt: True keeps n-grams of the prompt, too.

    num_speculative_tokens holds the window's W (N - 1) - 1 tokens, and N - 1 of at least one n-gram; as many n-grams as
    fit are verified.
    """

    window_size: int = 5
    ngram_size: int = 4
    guess_set_size: int = 5
    pool_from_prompt: bool = True

    def __post_init__(self):
        super().__post_init__()
        checks.require(
            checks.integer("speculative_config: window_size", self.window_size, 1),
            checks.integer("speculative_config: ngram_size", self.ngram_size, 2),
            checks.integer("speculative_config: guess_set_size", self.guess_set_size, 1),
            error=ConfigError,
        )
        least = (self.window_size + 1) * (self.ngram_size - 1) - 1
        if least > self.num_speculative_tokens:
            raise ConfigError(
                f"speculative_config: window_size {self.window_size} and ngram_size {self.ngram_size} take {least} "
                f"draft tokens with one guess, num_speculative_tokens is {self.num_speculative_tokens}"
            )

    @property
    def draws_trees(self) -> bool:
        return True

    def proposer(self, context: ProposerContext) -> JacobiProposer:
        return JacobiProposer(self)


class NGramPool:
    """N-grams by their first tokens, the newest few of each.

    Args:
      most: maximum n-grams for one first token.
    """

    def __init__(self, most: int):
        self._most = most
        self._ngrams: dict[int, dict[tuple[int, ...], None]] = {}  # the newest come last

    def put(self, ngram: tuple[int, ...]) -> None:
        kept = self._ngrams.setdefault(ngram[0], {})
        kept.pop(ngram[1:], None)
        kept[ngram[1:]] = None
        if len(kept) > self._most:
            del kept[next(iter(kept))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Returns the continuations of a token, the newest first."""
        return list(self._ngrams.get(token, ()))[::-1]


class _Row:
    """A row's window and n-grams.

    levels: [N - 1][W] guesses, the oldest first: levels[n][i] is for n + i tokens after the newest one of the
      sequence's first `length` tokens. The guess for that token itself, levels[0][0], is not used.
    places: where the last guess of each column is in the draft under way; None where it is not.
    """

    def __init__(self, method: Jacobi, prompt: list[int], length: int):
        # Seeded by the prompt alone, so that a sequence has the same drafts every time.
        self._rng, self._prompt = random.Random(len(prompt)), prompt
        self.pool, self.length = NGramPool(method.guess_set_size), length
        self.levels = [self._guesses(method.window_size) for _ in range(method.ngram_size - 1)]
        self.places: list[int | None] = []
        if method.pool_from_prompt:
            size = method.ngram_size
            for end in range(size, len(prompt) + 1):
                self.pool.put(tuple(prompt[end - size : end]))

    def _guesses(self, count: int) -> list[int]:
        return self._rng.choices(self._prompt, k=count)

    def draft(self, newest: int, length: int, draft: DraftTree) -> None:
        """Puts n-grams and the window into the draft of a sequence of some length."""
        passed = length - self.length
        for level in self.levels:
            level[:] = [*level[passed:], *self._guesses(min(passed, len(level)))]
        self.length, self.levels[0][0] = length, newest
        window = len(self.levels) * len(self.levels[0]) - 1
        for ngram in self.pool.after(newest):
            if draft.room - len(draft.ids) >= window + len(ngram):
                draft.add_run(ngram)
        at: int | None = AFTER_TEXT
        self.places = []
        for column in range(len(self.levels[0])):
            if column and at is not None:
                at = draft.add(at, self.levels[0][column])
            last = at
            for level in self.levels[1:]:
                last = None if last is None else draft.add(last, level[column])
            self.places.append(last)

    def observe(self, count: int, sampled: list[int]) -> None:
        """Records the tokens that the model sampled after the newest token and after each of `count` draft tokens."""
        found: list[int] = []
        for column, place in enumerate(self.places):
            if place is None or place >= count or sampled[place + 1] < 0:
                found += self._guesses(1)
            else:
                found.append(sampled[place + 1])
                self.pool.put((*(level[column] for level in self.levels), found[-1]))
        self.levels = [*self.levels[1:], found]
        self.length += 1


class JacobiProposer(Proposer):
    """See `Jacobi`."""

    def __init__(self, method: Jacobi):
        self.method = method
        self._rows: dict[int, _Row] = {}

    def begin(self, row: int, token_ids: np.ndarray, num_prompt: int, salt: str) -> None:
        self._rows[row] = _Row(self.method, token_ids[:num_prompt].tolist(), len(token_ids))

    def end(self, row: int, token_ids: np.ndarray, completed: bool) -> None:
        del self._rows[row]

    def propose(self, texts: Texts, rows: np.ndarray, most: np.ndarray) -> Drafts:
        drafts = [DraftTree(room) for room in most.tolist()]
        for row, length, draft in zip(rows.tolist(), texts.lengths[rows].tolist(), drafts, strict=True):
            if draft.room:
                self._rows[row].draft(int(texts.token_ids[row, length - 1]), length, draft)
        return drafts_of(drafts)

    def observe(self, rows: np.ndarray, drafts: Drafts) -> None:
        assert drafts.sampled is not None
        for row, count, sampled in zip(rows.tolist(), drafts.counts.tolist(), drafts.sampled.tolist(), strict=True):
            if count:
                self._rows[row].observe(count, sampled)
