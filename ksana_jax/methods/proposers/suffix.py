"""SuffixDecoding: drafts while the next token is probable, and longer after a longer match.

Source: SuffixDecoding, Oliaro et al., arXiv:2411.04975. Tries of bounded depth stand for their suffix trees. Settings
are named as in vLLM, except that `max_nodes` bounds the nodes of earlier outputs, and not a number of requests.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Literal

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.methods.proposers.draft_tree import DraftTree
from ksana_jax.methods.proposers.trie_proposer import TrieMatch, TrieProposer
from ksana_jax.methods.proposers.tries import Trie
from ksana_jax.scheduler.speculative.base import ProposerContext, SpeculativeMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suffix(SpeculativeMethod):
    """Drafts from the row's own sequence and from outputs of all requests, from where the sequence's end matches best.

    Args:
      suffix_decoding_max_tree_depth: tokens of the stored runs, including the matching ones.
      suffix_decoding_max_spec_factor: maximum draft tokens for each token that matches.
      suffix_decoding_min_token_prob: a draft ends where the share of sequences that continued like it falls below.
      max_nodes, trie_scope: see `TrieLookup`.
    """

    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    max_nodes: int = 1_000_000
    trie_scope: Literal["salt", "request"] = "salt"

    def __post_init__(self):
        super().__post_init__()
        name = "speculative_config: "
        checks.require(
            checks.integer(f"{name}suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 2, 256),
            checks.number(f"{name}suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, above=0),
            checks.number(f"{name}suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0, 1),
            checks.integer(f"{name}max_nodes", self.max_nodes, 1024),
            checks.one_of(f"{name}trie_scope", self.trie_scope, ("salt", "request")),
            error=ConfigError,
        )

    def proposer(self, context: ProposerContext) -> TrieProposer:
        depth = self.suffix_decoding_max_tree_depth
        continued = functools.partial(
            _continued, factor=self.suffix_decoding_max_spec_factor, least=self.suffix_decoding_min_token_prob
        )
        shares = self.trie_scope == "salt"
        return TrieProposer(depth, depth - 1, self.max_nodes, own_outputs=True, shares=shares, continued=continued)


def _continued(
    own: TrieMatch, outputs: TrieMatch, newest: list[int], draft: DraftTree, *, factor: float, least: float
) -> None:
    """Drafts from the trie with more expected tokens."""
    expected, best = 0.0, []
    for ends in (own,) if outputs is own else (own, outputs):
        for length in range(len(ends.nodes) - 1, 0, -1):
            if node := ends.continued(length):
                most = min(draft.room, int(factor * length))
                found = _probable_branch(ends.trie, node, newest[-length:], most, least)
                if found[0] > expected:
                    expected, best = found
                break
    draft.set_run(best)


def _probable_branch(trie: Trie, node: int, run: list[int], most: int, least: float) -> tuple[float, list[int]]:
    """Returns the most frequent tokens after a run while they are probable, and their expected number."""
    draft, probability, expected = [], 1.0, 0.0
    for token, share in itertools.islice(trie.branch(node, run), most):
        # The newest runs, which have no continuation yet, make shares a little too low.
        probability *= share
        if probability < least:
            break
        draft.append(token)
        expected += probability
    return expected, draft
