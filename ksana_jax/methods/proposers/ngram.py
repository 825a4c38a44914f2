"""Prompt lookup: drafts the tokens that followed the last few tokens where the sequence had them before.

Source: Prompt Lookup Decoding, Apoorv Saxena, 2023 (github.com/apoorvumang/prompt-lookup-decoding); LLMA,
arXiv:2304.04487. The settings are named as in vLLM.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.scheduler.speculative.base import Proposer, ProposerContext, SpeculativeMethod, Texts
from ksana_jax.scheduler.step.drafts import Drafts

_BYTES = 4  # of a token in the keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram(SpeculativeMethod):
    """Drafts from the row's own sequence.

    Args:
      prompt_lookup_min, prompt_lookup_max: tokens of the n-grams that are looked up, the longest first. If one is
        missing, it equals the other; if both are, they are 5.
      match: "latest" continues the last earlier occurrence of an n-gram, "earliest" the first one, as vLLM does.
    """

    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    match: Literal["latest", "earliest"] = "latest"

    def __post_init__(self):
        super().__post_init__()
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        low, high = (high if low is None else low), (low if high is None else high)
        low, high = (5 if low is None else low), (5 if high is None else high)
        checks.require(
            checks.integer("speculative_config: prompt_lookup_min", low, 1, 64),
            checks.integer("speculative_config: prompt_lookup_max", high, 1, 64),
            checks.one_of("speculative_config: match", self.match, ("latest", "earliest")),
            error=ConfigError,
        )
        if low > high:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min is {low}, must be at most prompt_lookup_max {high}"
            )
        object.__setattr__(self, "prompt_lookup_min", low)
        object.__setattr__(self, "prompt_lookup_max", high)

    def proposer(self, context: ProposerContext) -> NGramProposer:
        return NGramProposer(self, context.config.max_num_seqs)


class _Index:
    """The n-grams of one sequence that have a continuation.

    ends: for each size of n-grams {tokens as bytes: where the n-gram ends}. length: tokens that are in `text`.
    """

    def __init__(self, sizes: range):
        self.text = bytearray()
        self.ends: list[dict[bytes, int]] = [{} for _ in sizes]
        self.length = 0


class NGramProposer(Proposer):
    """See `NGram`. A step costs time by its new tokens, whatever the length of the sequences."""

    def __init__(self, method: NGram, num_rows: int):
        assert method.prompt_lookup_min is not None and method.prompt_lookup_max is not None
        self.most = method.num_speculative_tokens
        self._latest = method.match == "latest"
        self._sizes = range(method.prompt_lookup_max, method.prompt_lookup_min - 1, -1)
        self._texts = [_Index(self._sizes) for _ in range(num_rows)]

    def begin(self, row: int, token_ids: np.ndarray, num_prompt: int, salt: str) -> None:
        self._texts[row] = _Index(self._sizes)

    def end(self, row: int, token_ids: np.ndarray, completed: bool) -> None:
        self._texts[row] = _Index(self._sizes)

    def propose(self, texts: Texts, rows: np.ndarray, most: np.ndarray) -> Drafts:
        ids, counts = np.zeros((len(rows), self.most), np.int32), np.zeros(len(rows), np.int32)
        for place, (row, length, room) in enumerate(
            zip(rows.tolist(), texts.lengths[rows].tolist(), most.tolist(), strict=True)
        ):
            text = self._texts[row]
            if length > text.length:
                text.text += texts.token_ids[row, text.length : length].tobytes()
                self._add(text, length)
            if room and (end := self._find(text)):
                draft = _continued(text, end, room)
                ids[place, : len(draft)], counts[place] = draft, len(draft)
        return Drafts(ids, counts)

    def _add(self, index: _Index, length: int) -> None:
        """Records the n-grams that are followed by one of the new tokens."""
        text, first, index.length = index.text, max(index.length, 1), length
        for size, ends in zip(self._sizes, index.ends, strict=True):
            for end in range(max(first, size), length):
                key = bytes(text[_BYTES * (end - size) : _BYTES * end])
                if self._latest:
                    ends[key] = end
                else:
                    ends.setdefault(key, end)

    def _find(self, index: _Index) -> int | None:
        """Returns the end of the longest n-gram that equals the end of the sequence and occurs before."""
        for size, ends in zip(self._sizes, index.ends, strict=True):
            if index.length > size and (end := ends.get(bytes(index.text[_BYTES * (index.length - size) :]))):
                return end
        return None


def _continued(index: _Index, end: int, count: int) -> np.ndarray:
    """Returns the `count` tokens after `end`; beyond the sequence, the draft repeats its own beginning, since a
    sequence that has come back to its last few tokens may do so again."""
    known = np.frombuffer(bytes(index.text[_BYTES * end : _BYTES * (end + count)]), np.int32)
    return known if len(known) == count else np.resize(known, count)
