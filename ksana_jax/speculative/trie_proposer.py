"""The part that proposers with tries share: what is put into the tries of each row, and when. Decides no draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ksana_jax.speculative.base import Proposer, Texts
from ksana_jax.speculative.draft_tree import DraftTree, drafts_of
from ksana_jax.speculative.shared_tries import SharedTries
from ksana_jax.speculative.tries import Cursor, Trie
from ksana_jax.step.drafts import Drafts

# (trie of the row's own text, trie of outputs, newest tokens, empty draft) puts tokens into the draft.
Continue: TypeAlias = Callable[[Trie, Trie, list[int], DraftTree], None]


class _Row:
    """The tries of a row's text. length: of the text whose output is in them."""

    def __init__(self, own: Cursor, outputs: tuple[Cursor, ...], length: int):
        self.own, self.outputs, self.length = own, outputs, length

    def put(self, tokens: list[int]) -> None:
        for cursor in self.outputs:
            cursor.put(tokens)
        self.length += len(tokens)


class TrieProposer(Proposer):
    """Keeps a trie of each row's text, and one of outputs for each salt.

    Args:
      depth: of tries. match_length: newest tokens that `continued` is given.
      max_nodes: of the tries of outputs together.
      own_outputs: whether the row's own trie has its output, too; the prompt is always there.
      shares: whether there are tries of outputs of others.
      continued: decides what follows the newest tokens.
    """

    reads_texts_alone = True

    def __init__(
        self, depth: int, match_length: int, max_nodes: int, *, own_outputs: bool, shares: bool, continued: Continue
    ):
        self.shared = SharedTries(depth, max_nodes)
        self._depth, self._match_length = depth, match_length
        self._own_outputs, self._shares, self._continued = own_outputs, shares, continued
        self._rows: dict[int, _Row] = {}

    def begin(self, row: int, token_ids: np.ndarray, num_prompt: int, salt: str) -> None:
        own = Cursor(Trie(self._depth))
        # Outputs before a preemption are in the tries of outputs already.
        own.put(token_ids[: len(token_ids) if self._own_outputs else num_prompt].tolist())
        shared = (self.shared.cursor(salt),) if self._shares else ()
        self._rows[row] = _Row(own, (*shared, own) if self._own_outputs else shared, len(token_ids))

    def end(self, row: int, token_ids: np.ndarray, completed: bool) -> None:
        state = self._rows.pop(row)
        state.put(token_ids[state.length :].tolist())

    def learn(self, token_ids: np.ndarray, salt: str = "") -> None:
        """Puts a text into the trie of outputs, as if a request had generated it."""
        self.shared.cursor(salt).put(token_ids.tolist())

    def propose(self, texts: Texts, rows: np.ndarray, most: np.ndarray) -> Drafts:
        drafts = [DraftTree(room) for room in most.tolist()]
        for row, length, draft in zip(rows.tolist(), texts.lengths[rows].tolist(), drafts, strict=True):
            state = self._rows[row]
            if length > state.length:
                state.put(texts.token_ids[row, state.length : length].tolist())
            if draft.room:
                newest = texts.token_ids[row, max(length - self._match_length, 0) : length].tolist()
                outputs = state.outputs[0].trie if state.outputs else state.own.trie
                self._continued(state.own.trie, outputs, newest, draft)
        self.shared.shrink()
        return drafts_of(drafts)
