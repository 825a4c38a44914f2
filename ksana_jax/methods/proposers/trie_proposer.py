"""Shared by proposers with tries: which tokens enter the tries of each row, and when. Decides no draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from ksana_jax.methods.proposers.draft_tree import DraftTree, drafts_of
from ksana_jax.methods.proposers.shared_tries import SharedTries
from ksana_jax.methods.proposers.tries import ROOT, Cursor, Trie
from ksana_jax.scheduler.speculative.base import Proposer, Texts
from ksana_jax.scheduler.step.drafts import Drafts


class TrieMatch(NamedTuple):
    """The runs at the end of a sequence that a trie has. nodes: of these runs, longest first, the empty run last."""

    trie: Trie
    nodes: list[int]

    def continued(self, length: int) -> int:
        """Returns the node of the last `length` tokens; ROOT if no sequence continued them."""
        node = self.nodes[-1 - length] if length < len(self.nodes) else ROOT
        return node if self.trie.best[node] else ROOT


# (ends in the trie of the row's sequence, in the outputs' trie, newest tokens, empty draft) adds tokens to the draft.
Continue: TypeAlias = Callable[[TrieMatch, TrieMatch, list[int], DraftTree], None]


class _Row:
    """The tries of a row's sequence.

    Args:
      own: the trie of the sequence, of its prompt alone or with its output. outputs: cursor in the trie of outputs, or
        None.
      newest: the last tokens of the sequence, at most `most`, whose runs are looked up.
      length: of the sequence whose output is in the tries.
    """

    def __init__(
        self, own: Cursor, own_outputs: bool, outputs: Cursor | None, newest: list[int], most: int, length: int
    ):
        self._own, self._own_outputs, self._outputs = own, own_outputs, outputs
        self.newest, self._most, self.length = newest, most, length
        self._in_own = [] if own_outputs else own.trie.follow([ROOT], newest, most)

    def put(self, tokens: list[int]) -> None:
        if self._outputs is not None:
            self._outputs.put(tokens)
        if self._own_outputs:
            self._own.put(tokens)
        else:
            self._in_own = self._own.trie.follow(self._in_own, tokens, self._most)
        self.newest = [*self.newest, *tokens][-self._most :]
        self.length += len(tokens)

    def ends(self) -> tuple[TrieMatch, TrieMatch]:
        """Returns the ends of the sequence in its own trie and in the trie of outputs, which may be the same."""
        size = 1 + min(len(self.newest), self._most)
        own = TrieMatch(self._own.trie, self._own.nodes[-size:] if self._own_outputs else self._in_own)
        if self._outputs is None:
            return own, own
        nodes, trie = self._outputs.nodes[-size:], self._outputs.trie
        # A run that begins before the output may be in outputs of others.
        return own, TrieMatch(trie, nodes if len(nodes) == size else trie.follow([ROOT], self.newest, self._most))


class TrieProposer(Proposer):
    """Keeps a trie of each row's sequence, and one of outputs for each salt.

    Args:
      depth: of tries. match_length: newest tokens that `continued` is given.
      max_nodes: of the tries of outputs together.
      own_outputs: True if the row's own trie has its output, too; the prompt is always included.
      shares: True if tries hold outputs of other requests.
      continued: drafts the continuation of the newest tokens.
    """

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
        shared, most = self.shared.cursor(salt) if self._shares else None, self._match_length
        self._rows[row] = _Row(own, self._own_outputs, shared, token_ids[-most:].tolist(), most, len(token_ids))

    def end(self, row: int, token_ids: np.ndarray, completed: bool) -> None:
        state = self._rows.pop(row)
        state.put(token_ids[state.length :].tolist())

    def learn(self, token_ids: np.ndarray, salt: str = "") -> None:
        """Puts a sequence into the trie of outputs, as if a request had generated it."""
        self.shared.cursor(salt).put(token_ids.tolist())

    def propose(self, texts: Texts, rows: np.ndarray, most: np.ndarray) -> Drafts:
        drafts = [DraftTree(room) for room in most.tolist()]
        for row, length, draft in zip(rows.tolist(), texts.lengths[rows].tolist(), drafts, strict=True):
            state = self._rows[row]
            if length > state.length:
                state.put(texts.token_ids[row, state.length : length].tolist())
            if draft.room:
                self._continued(*state.ends(), state.newest, draft)
        self.shared.shrink()
        return drafts_of(drafts)
