"""Scheduling policies: the lower its rank, the earlier a sequence runs and the later it is preempted.

A policy is a function that returns a sequence's rank. A policy with state, or with ranks that change while sequences
wait, is a class with the methods of `SchedulingPolicy`; each scheduler constructs its own, with
max_num_seqs. A policy of your own needs no entry here: `LLM(policy="my_package.module:mine")`, or the function or class
itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from ksana_jax.core.plugins import resolve
from ksana_jax.scheduler.sequence import Sequence


class SchedulingPolicy(Protocol):
    """The order of service in one scheduler.

    A policy may also have `reorder(waiting: list[Sequence], memory: KVMemory) -> None`. It is called before sequences
    are admitted in a step, and may set `seq.rank` of waiting sequences: for ageing, or for their cached prefixes
    (`memory.prefixes.num_cached_tokens`). A running sequence keeps the rank with which it was admitted.
    """

    def rank(self, seq: Sequence, /) -> Any:
        """Returns a sortable value; called once, when a sequence arrives."""
        ...


@dataclasses.dataclass(frozen=True)
class ByRank:
    """Wraps a rank function as a policy."""

    rank: Callable[[Sequence], Any]


SCHEDULING_POLICIES: dict[str, str] = {
    "fcfs": "ksana_jax.scheduler.waiting:fcfs",
    "shortest_first": "ksana_jax.methods.scheduling:shortest_first",
    "fewest_tokens_left": "ksana_jax.methods.scheduling:fewest_tokens_left",
    "longest_prefix": "ksana_jax.methods.scheduling:LongestPrefix",
}


def find_scheduling_policy(spec: Any) -> Callable[[Sequence], Any] | type[SchedulingPolicy]:
    """Returns the policy of `EngineConfig.policy`: a key of SCHEDULING_POLICIES, "package.module:name", or a
    function or class.

    Raises:
      ConfigError: no policy has that name.
    """
    return resolve(spec, SCHEDULING_POLICIES, "policy")


def make_policy(spec: Any, max_num_seqs: int) -> SchedulingPolicy:
    """Creates the policy of one scheduler; see `find_scheduling_policy`."""
    found: Any = find_scheduling_policy(spec)
    return found(max_num_seqs) if isinstance(found, type) else ByRank(found)
