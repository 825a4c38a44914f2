"""Orders in which requests are served. A policy is one function: the smaller its value, the earlier a sequence runs,
and the later it is preempted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ksana_jax.sequence import Sequence

# Any value that sorts; asked once, when a sequence arrives.
Policy = Callable[[Sequence], Any]


def fcfs(seq: Sequence) -> float:
    """First come, first served: nobody starves."""
    return seq.seq_id


def shortest_first(seq: Sequence) -> float:
    """Shortest prompt first: lower mean latency; under lasting load a long prompt can wait for ever."""
    return seq.num_prompt


def fewest_tokens_left(seq: Sequence) -> float:
    """Smallest bound on what is left to compute first: prompt and output, as far as max_tokens tells."""
    return seq.max_len


class LongestPrefix:
    """Requests that share a prefix run together, so that it is computed once; groups in order of their first request.

    Within a group prompts are in lexicographic order, which puts the longest common prefixes next to each other. A
    group takes in no more than `patience` requests after its first one: nobody is overtaken by more than that many.

    Source: KsanaLLM's scheduling by longest common prefix; SGLang's depth-first order, arXiv:2312.07104.
    """

    def __init__(self, patience: int, prefix: int = 32):
        self._patience, self._prefix = patience, prefix
        self._first: dict[tuple[str, bytes], int] = {}

    def __call__(self, seq: Sequence) -> tuple[int, bytes]:
        # Big endian: bytes then sort as the numbers do.
        tokens = seq.token_ids.astype(">i4").tobytes()
        group = (seq.salt, tokens[: 4 * self._prefix])
        first = self._first.get(group)
        if first is None or seq.seq_id - first > self._patience:
            if len(self._first) > 4096:
                self._first = {g: f for g, f in self._first.items() if seq.seq_id - f <= self._patience}
            self._first[group] = first = seq.seq_id
        return (first, tokens)


POLICIES: dict[str, Policy] = {
    "fcfs": fcfs,
    "shortest_first": shortest_first,
    "fewest_tokens_left": fewest_tokens_left,
}


def policy_named(name: str, max_num_seqs: int) -> Policy:
    """A policy by its name in `NAMES`; longest_prefix remembers the groups of one scheduler.

    Raises:
      ValueError: there is none of that name.
    """
    if name == "longest_prefix":
        return LongestPrefix(patience=4 * max_num_seqs)
    if name not in POLICIES:
        raise ValueError(f"policy is {name!r}, must be one of {', '.join(NAMES)}")
    return POLICIES[name]


NAMES = (*POLICIES, "longest_prefix")
