"""Scheduling policies: the lower its rank, the earlier a sequence runs and the later it is preempted.

A policy is a function that returns a sequence's rank. One that remembers something, or whose ranks change while
sequences wait, is a class with the methods of `SchedulingPolicy`; each scheduler makes one of its own, with
max_num_seqs. A policy of your own needs no entry here: `LLM(policy="my_package.module:mine")`, or the function or class
itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from ksana_jax.plugins import resolve
from ksana_jax.sequence import Sequence


class SchedulingPolicy(Protocol):
    """The order of service in one scheduler.

    A policy may also have `reorder(waiting: list[Sequence], memory: KVMemory) -> None`. It is called before sequences
    are admitted in a step, and may set `seq.rank` of waiting sequences: for ageing, or for what is cached by now
    (`memory.prefixes.num_cached_tokens`). A running sequence keeps the rank with which it was admitted.
    """

    def rank(self, seq: Sequence, /) -> Any:
        """Returns a sortable value; called once, when a sequence arrives."""
        ...


@dataclasses.dataclass(frozen=True)
class ByRank:
    """Wraps a rank function as a policy."""

    rank: Callable[[Sequence], Any]


def fcfs(seq: Sequence) -> float:
    """Serves requests in order of arrival, so no request starves."""
    return seq.seq_id


def shortest_first(seq: Sequence) -> float:
    """Serves the shortest prompt first: lower mean latency, but under sustained load a long prompt may starve."""
    return seq.num_prompt


def fewest_tokens_left(seq: Sequence) -> float:
    """Serves the request with the fewest prompt tokens plus max_tokens first."""
    return seq.max_len


class LongestPrefix:
    """Runs requests that share a prefix together, so that it is computed once; groups in order of their first request.

    Within a group prompts are in lexicographic order, which puts the longest common prefixes next to each other. A
    group accepts at most `patience` requests after its first one, so no request is overtaken by more than that many.
    The default is four times the number of rows.

    Source: KsanaLLM's scheduling by longest common prefix; SGLang's depth-first order, arXiv:2312.07104.
    """

    def __init__(self, max_num_seqs: int, *, patience: int | None = None, prefix: int = 32):
        self._patience = 4 * max_num_seqs if patience is None else patience
        self._prefix = prefix
        self._first: dict[tuple[str, bytes], int] = {}

    def rank(self, seq: Sequence) -> tuple[int, bytes]:
        # Big endian: bytes then sort as the numbers do.
        tokens = seq.token_ids.astype(">i4").tobytes()
        group = (seq.kv.salt, tokens[: 4 * self._prefix])
        first = self._first.get(group)
        if first is None or seq.seq_id - first > self._patience:
            if len(self._first) > 4096:
                self._first = {g: f for g, f in self._first.items() if seq.seq_id - f <= self._patience}
            self._first[group] = first = seq.seq_id
        return (first, tokens)


SCHEDULING_POLICIES: dict[str, Callable[[Sequence], Any] | type[SchedulingPolicy]] = {
    "fcfs": fcfs,
    "shortest_first": shortest_first,
    "fewest_tokens_left": fewest_tokens_left,
    "longest_prefix": LongestPrefix,
}


def find_scheduling_policy(spec: Any) -> Callable[[Sequence], Any] | type[SchedulingPolicy]:
    """Returns the policy of `EngineConfig.policy`: a key of SCHEDULING_POLICIES, "package.module:name", or a
    function or class.

    Raises:
      ConfigError: there is none of that name.
    """
    return resolve(spec, SCHEDULING_POLICIES, "policy")


def make_policy(spec: Any, max_num_seqs: int) -> SchedulingPolicy:
    """Creates the policy of one scheduler; see `find_scheduling_policy`."""
    found: Any = find_scheduling_policy(spec)
    return found(max_num_seqs) if isinstance(found, type) else ByRank(found)
