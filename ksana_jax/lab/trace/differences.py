"""Finds where two recordings diverge: the first step with other decisions, blocks or tokens. Knows no engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ksana_jax.lab.recording import Event, Recording

# Compared fields of steps. rows: which sequences compute how many tokens, in which order.
KINDS = ("rows", "blocks", "tokens")
WORDS = {"rows": "decision", "blocks": "choice of blocks", "tokens": "token"}


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference between two steps. kind: of KINDS. a, b: the value of each; None without such a step."""

    step: int
    kind: str
    a: Any
    b: Any

    def lines(self, a: str = "recorded", b: str = "now") -> list[str]:
        """Describes the difference in one line for each side."""
        width = max(len(a), len(b))
        return [
            f"step {self.step}: the first {WORDS[self.kind]} that differs",
            f"  {a:{width}}  {_shown(self.kind, self.a, self.b)}",
            f"  {b:{width}}  {_shown(self.kind, self.b, self.a)}",
        ]


def difference(a: Event | None, b: Event | None, kinds: Sequence[str] = KINDS) -> Difference | None:
    """Returns the first difference between two steps, or None. One of them may be missing."""
    for kind in kinds:
        of_a, of_b = (None if step is None else step[kind] for step in (a, b))
        if of_a != of_b:
            step = a or b
            assert step is not None
            return Difference(step["step"], kind, of_a, of_b)
    return None


def first_differences(a: Recording, b: Recording) -> dict[str, Difference]:
    """Returns the first other decision and the first other choice of blocks, as far as the recordings have one.

    Tokens are compared by sequence, see `other_tokens`: where decisions differ, steps sample for other sequences.
    """
    return {kind: found for kind in ("rows", "blocks") if (found := first_difference(a.steps, b.steps, (kind,)))}


def outputs(recording: Recording) -> dict[str, list[int]]:
    """Returns the sampled tokens of each sequence."""
    found: dict[str, list[int]] = {}
    for step in recording.steps:
        for name, sampled in step["tokens"].items():
            # With draft tokens, a step samples a run of tokens.
            found.setdefault(name, []).extend(sampled if isinstance(sampled, list) else [sampled])
    return found


def other_tokens(a: Recording, b: Recording) -> dict[str, int]:
    """Returns for each sequence whose tokens differ the index of the first output token that does."""
    left, right = outputs(a), outputs(b)
    found = {}
    for name in (*left, *(right.keys() - left.keys())):
        of_a, of_b = left.get(name, []), right.get(name, [])
        if of_a != of_b:
            same = (i for i, (x, y) in enumerate(zip(of_a, of_b, strict=False)) if x != y)
            found[name] = next(same, min(len(of_a), len(of_b)))
    return found


def first_difference(a: Sequence[Event], b: Sequence[Event], kinds: Sequence[str] = KINDS) -> Difference | None:
    """Returns the first difference between the steps of two recordings, or None."""
    for i in range(max(len(a), len(b))):
        if found := difference(a[i] if i < len(a) else None, b[i] if i < len(b) else None, kinds):
            return found
    return None


def other_settings(a: Recording, b: Recording) -> dict[str, tuple[Any, Any]]:
    """Returns the settings that differ between the engines of two recordings, by name, where both describe them."""
    left, right = (
        r.header["config"] | {k: v for k, v in r.header.items() if k not in ("config", "event")} for r in (a, b)
    )
    found = {name: (left[name], right[name]) for name in left if name in right}
    return {name: values for name, values in found.items() if values[0] != values[1]}


def other_requests(a: Recording, b: Recording) -> str | None:
    """Describes the first request that differs between two recordings, or returns None: decisions are comparable."""
    asked = [
        [request for event in r.events if event["event"] == "created" for request in event["requests"]] for r in (a, b)
    ]
    for i, (left, right) in enumerate(zip(*asked, strict=False)):
        for key in ("request_id", "prompt_token_ids", "params"):
            if left[key] != right[key]:
                return f"request {i + 1} has another {key}: {left[key]!s:.60} and {right[key]!s:.60}"
    if len(asked[0]) != len(asked[1]):
        return f"one has {len(asked[0])} requests and the other {len(asked[1])}"
    return None


def _shown(kind: str, mine: Any, other: Any) -> str:
    """Describes one side by the parts that the other lacks."""
    if mine is None:
        return "no such step: nothing was left to compute"
    if kind == "rows":
        own = [row for row in mine if row not in (other or ())]
        rows = own if own or len(mine) != len(other or ()) else mine  # the same rows in another order
        also = "" if len(rows) == len(mine) else f" (and {len(mine) - len(rows)} rows that both have)"
        return (_limited([f"{name} computes {n} after {done}" for name, done, n in rows]) or "no row of its own") + also
    own = [f"{name}: {value}" for name, value in mine.items() if (other or {}).get(name) != value]
    return _limited(own) or "nothing of its own"


def _limited(items: list[str], most: int = 12) -> str:
    return ", ".join(items[:most]) + (f", and {len(items) - most} more" if len(items) > most else "")
