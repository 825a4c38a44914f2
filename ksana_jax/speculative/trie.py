"""Lookahead: drafts the most frequent continuation in a trie of the row's prompt and of what the engine has generated.

Source: Lookahead, Zhao et al., arXiv:2312.12728, with its best branch alone: prompts before outputs, and elimination
by halving counts.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

from ksana_jax import checks
from ksana_jax.errors import ConfigError
from ksana_jax.speculative.base import ProposerContext, SpeculativeMethod
from ksana_jax.speculative.trie_proposer import TrieProposer
from ksana_jax.speculative.tries import Trie


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrieLookup(SpeculativeMethod):
    """Drafts from the row's prompt, and from outputs of all requests.

    Args:
      branch_length: tokens of the runs that are kept, those that are looked up included.
      match_length: most tokens at the end of the text that are looked up; the longest match is continued.
      max_nodes: runs kept of outputs. Beyond them counts are halved, and what has been seen once is removed.
      trie_scope: "salt" learns from the outputs of requests with the same cache salt, since the speed of a guess tells
        what others have generated; "request" from the row's own output alone.
    """

    branch_length: int = 8
    match_length: int = 4
    max_nodes: int = 65_536
    trie_scope: Literal["salt", "request"] = "salt"

    def __post_init__(self):
        super().__post_init__()
        checks.require(
            checks.integer("speculative_config: branch_length", self.branch_length, 2, 64),
            checks.integer("speculative_config: match_length", self.match_length, 1, self.branch_length - 1),
            checks.integer("speculative_config: max_nodes", self.max_nodes, 1024),
            checks.one_of("speculative_config: trie_scope", self.trie_scope, ("salt", "request")),
            error=ConfigError,
        )

    def proposer(self, context: ProposerContext) -> TrieProposer:
        shares = self.trie_scope == "salt"
        return TrieProposer(
            self.branch_length,
            self.match_length,
            self.max_nodes,
            own_outputs=not shares,
            shares=shares,
            continued=_continued,
        )


def _continued(own: Trie, outputs: Trie, newest: list[int], room: int) -> list[int]:
    """Returns the most frequent continuation of the longest match."""
    for start in range(len(newest)):
        run = newest[start:]
        # Their weight of the own text is ten thousand times that of others: it decides as long as it goes on.
        for trie in (own, outputs):
            if (node := trie.find(run)) is not None:
                return [token for token, _ in itertools.islice(trie.branch(node, run), room)]
    return []
