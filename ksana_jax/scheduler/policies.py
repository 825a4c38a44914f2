"""Orders in which requests are served. A policy is one function: the smaller its value, the earlier a sequence runs,
and the later it is preempted."""

from __future__ import annotations

from collections.abc import Callable

from ksana_jax.sequence import Sequence

Policy = Callable[[Sequence], float]


def fcfs(seq: Sequence) -> float:
    """First come, first served: nobody starves."""
    return seq.seq_id


def shortest_first(seq: Sequence) -> float:
    """Shortest prompt first: lower mean latency; under lasting load a long prompt can wait for ever."""
    return seq.num_prompt


def fewest_tokens_left(seq: Sequence) -> float:
    """Smallest bound on what is left to compute first: prompt and output, as far as max_tokens tells."""
    return seq.max_len


POLICIES: dict[str, Policy] = {
    "fcfs": fcfs,
    "shortest_first": shortest_first,
    "fewest_tokens_left": fewest_tokens_left,
}
