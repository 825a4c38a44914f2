"""Masks of the tokens that grammars allow in a step, and drafts that keep to them. NumPy; knows no grammars."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.step.drafts import Drafts
from ksana_jax.scheduler.step.types import StepInput


class Matcher(Protocol):
    """Follows one sequence through its grammar. Its state depends on the output's tokens alone, so a sequence keeps it
    through preemption and wherever its blocks are.

    Attributes:
      error: why it cannot continue, which ends the sequence; None if it can.
    """

    error: str | None

    def follow(self, output: np.ndarray) -> None:
        """Reads the tokens [n] of the output that it has not read yet."""
        ...

    def allow(self, mask: np.ndarray, drafts: Sequence[int]) -> None:
        """Writes which tokens may follow the output and some draft tokens into a mask [ceil(V / 32)] int32: token i is
        bit i % 32 of entry i // 32. All zeros fail the sequence. After drafts that the grammar forbids, which are never
        accepted, the mask is left as it is."""
        ...

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """Returns how many draft tokens come before the first that may not follow the output."""
        ...

    def forced(self) -> list[int]:
        """Returns tokens whose text must follow the output, [] if there is a choice."""
        ...


def following(rows: Rows, row: int) -> Matcher | None:
    """Returns the matcher of a row after all its tokens; None without one."""
    if (matcher := rows.settings.matchers.get(row)) is not None:
        matcher.follow(rows.token_ids[row, rows.num_prompt[row] : rows.num_known[row]])
    return matcher


def masks_for(step: StepInput, sampled: np.ndarray, rows: Rows, vocab_size: int) -> Callable[[], np.ndarray] | None:
    """Returns `StepInput.mask` of a step; None if none of its sampled rows [n] has a grammar."""
    if rows.settings.matchers.keys().isdisjoint(sampled.tolist()):
        return None
    return functools.partial(_masks, step, sampled, rows, vocab_size)


def _masks(step: StepInput, sampled: np.ndarray, rows: Rows, vocab_size: int) -> np.ndarray:
    drafts, width = step.drafts, 1 if step.drafts is None else step.shape.parts[0].width
    masks = np.full((step.num_sampled, -(-vocab_size // 32)), -1, np.int32)
    for place, row in enumerate(sampled.tolist()):
        if (matcher := following(rows, row)) is None:
            continue
        runs = [np.zeros(0, np.int32)] if drafts is None else drafts.runs(place)
        for mask, run in zip(masks[place * width :], runs, strict=False):
            matcher.allow(mask, run.tolist())
    return masks


def constrained(
    rows: Rows, decodes: np.ndarray, most: np.ndarray, drafts: Drafts | None, forces: bool
) -> Drafts | None:
    """Returns drafts of decodes [n] without tokens that grammars forbid.

    Args:
      most: [n] maximum draft tokens of each. drafts: None without any; those that branch are returned as they are.
      forces: whether a row drafts the tokens that its grammar forces, where they are more.
    """
    if drafts is not None and drafts.parents is not None:
        return drafts
    longest = max(int(most.max(initial=0)), 0 if drafts is None else drafts.ids.shape[1])
    ids, counts = np.zeros((len(decodes), longest), np.int32), np.zeros(len(decodes), np.int32)
    if drafts is not None:
        ids[:, : drafts.ids.shape[1]], counts[:] = drafts.ids, drafts.counts
    for place, row in enumerate(decodes.tolist()):
        if not most[place] or (matcher := following(rows, row)) is None:
            continue
        counts[place] = matcher.num_allowed(ids[place, : counts[place]].tolist())
        forced = matcher.forced()[: most[place]] if forces else []
        if len(forced) > counts[place]:
            ids[place, : len(forced)], counts[place] = forced, len(forced)
    return Drafts(ids, counts) if drafts is None else drafts._replace(ids=ids, counts=counts)
