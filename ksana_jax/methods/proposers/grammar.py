"""Jump forward: drafts the tokens that a row's grammar forces, and no others.

Source: jump-forward decoding of compressed finite state machines, Zheng et al., SGLang, arXiv:2312.07104, section 4.
Here the model checks the forced tokens, since it may spell the same text with others.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ksana_jax.scheduler.speculative.base import Proposer, ProposerContext, SpeculativeMethod, Texts
from ksana_jax.scheduler.step.drafts import Drafts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar(SpeculativeMethod):
    """Drafts for requests with `structured_outputs`; others decode as without speculation."""

    def proposer(self, context: ProposerContext) -> GrammarProposer:
        return GrammarProposer()


class GrammarProposer(Proposer):
    """Drafts nothing itself: `scheduler.step.masks.constrained` adds forced tokens to the drafts of any proposer."""

    needs_grammars = True

    def begin(self, row: int, token_ids: np.ndarray, num_prompt: int, salt: str) -> None:
        pass

    def end(self, row: int, token_ids: np.ndarray, completed: bool) -> None:
        pass

    def propose(self, texts: Texts, rows: np.ndarray, most: np.ndarray) -> Drafts:
        return Drafts(np.zeros((len(rows), 0), np.int32), np.zeros(len(rows), np.int32))
