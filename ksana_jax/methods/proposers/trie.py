"""Lookahead: drafts the most frequent continuation in a trie of the row's prompt and of the engine's outputs.

Source: Lookahead, Zhao et al., arXiv:2312.12728, section 4.2: its best branch alone, or hierarchical branches; prompts
before outputs, and elimination by halving counts. Branches are weighed by their share of sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Literal

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.methods.proposers.draft_tree import AFTER_TEXT, DraftTree
from ksana_jax.methods.proposers.trie_proposer import Continue, TrieMatch, TrieProposer
from ksana_jax.methods.proposers.tries import ROOT, Trie
from ksana_jax.scheduler.speculative.base import ProposerContext, SpeculativeMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrieLookup(SpeculativeMethod):
    """Drafts from the row's prompt, and from outputs of all requests.

    Args:
      branch_length: tokens of the stored runs, including the looked-up ones.
      match_length: maximum tokens at the end of the sequence that are looked up; the longest match is continued.
      decoding_mode: "one" drafts the best branch. "hier" drafts a tree of num_speculative_tokens tokens: the most
        probable continuations of the longest match, the prompt's first, then continuations of shorter matches.
      max_nodes: maximum runs of outputs. Beyond them counts are halved, and runs seen once are removed.
      trie_scope: "salt" learns from the outputs of requests with the same cache salt, because timing would reveal other
        tenants' outputs; "request" from the row's own output alone.
    """

    branch_length: int = 8
    match_length: int = 4
    decoding_mode: Literal["one", "hier"] = "one"
    max_nodes: int = 65_536
    trie_scope: Literal["salt", "request"] = "salt"

    def __post_init__(self):
        super().__post_init__()
        checks.require(
            checks.integer("speculative_config: branch_length", self.branch_length, 2, 64),
            checks.integer("speculative_config: match_length", self.match_length, 1, self.branch_length - 1),
            checks.integer("speculative_config: max_nodes", self.max_nodes, 1024),
            checks.one_of("speculative_config: decoding_mode", self.decoding_mode, tuple(MODES)),
            checks.one_of("speculative_config: trie_scope", self.trie_scope, ("salt", "request")),
            error=ConfigError,
        )

    @property
    def draws_trees(self) -> bool:
        return self.decoding_mode == "hier"

    def proposer(self, context: ProposerContext) -> TrieProposer:
        shares = self.trie_scope == "salt"
        return TrieProposer(
            self.branch_length,
            self.match_length,
            self.max_nodes,
            own_outputs=not shares,
            shares=shares,
            continued=MODES[self.decoding_mode],
        )


def _matches(own: TrieMatch, outputs: TrieMatch) -> Iterator[tuple[Trie, int, int]]:
    """Yields the runs at the end of a sequence that have continuations, longest first: tries, nodes and lengths."""
    # The authors weigh a row's own sequence ten thousand times as much as others: it decides while it continues.
    both = (own,) if outputs is own else (own, outputs)
    for length in range(max(len(ends.nodes) for ends in both) - 1, 0, -1):
        for ends in both:
            if node := ends.continued(length):
                yield ends.trie, node, length


def _best_branch(own: TrieMatch, outputs: TrieMatch, newest: list[int], draft: DraftTree) -> None:
    """Drafts the most frequent continuation of the longest match."""
    for trie, node, length in _matches(own, outputs):
        draft.set_run(trie.best_branch(node, newest[-length:], draft.room))
        return


def _branches(own: TrieMatch, outputs: TrieMatch, newest: list[int], draft: DraftTree) -> None:
    """Drafts the most probable continuations of the longest match, then of shorter ones."""
    for trie, node, length in _matches(own, outputs):
        _grow(draft, trie, node, newest[-length:])
        if draft.is_full:
            return


def _grow(draft: DraftTree, trie: Trie, node: int, run: list[int]) -> None:
    """Adds the continuations of a run, the most probable first."""
    counts, tokens, newest, older, depth = trie.counts, trie.tokens, trie.newest, trie.older, trie.depth
    # -probability, a number that makes it unique, the index of the previous token, node, length of the node's run.
    found: list[tuple[float, int, int, int, int]] = []
    place, length, probability, number = AFTER_TEXT, len(run), 1.0, 0
    while True:
        if length >= depth:
            node, cut = trie.continued(node, [*run, *draft.run_to(place)])
            length = len(cut)
        if node != ROOT:
            share = probability / (counts[node] + 1)  # one sequence more may continue in another way
            child = newest[node]
            if child and not found and not older[child]:  # the only one left
                probability, node, length = share * counts[child], child, length + 1
                if (place := draft.add(place, tokens[node])) is None:
                    return
                continue
            while child:  # among equals the newest comes first
                number += 1
                heappush(found, (-share * counts[child], number, place, child, length + 1))
                child = older[child]
        if not found:
            return
        probability, _, place, node, length = heappop(found)
        probability = -probability
        if (place := draft.add(place, tokens[node])) is None:
            return


MODES: dict[str, Continue] = {"one": _best_branch, "hier": _branches}
