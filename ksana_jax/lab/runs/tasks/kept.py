"""Kept tokens as a column of tasks, in engines with `kept_tokens`: those of each text are saved, their share shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, percent

if TYPE_CHECKING:
    from ksana_jax.lab.runs.tasks.base import TrialContext


def measured(trial: TrialContext, kept: Mapping[str, np.ndarray | None]) -> Iterator[Measurement]:
    """Saves the `kept_tokens` [L, K, T] of texts by digest, and yields the measurement "kept"; nothing without any."""
    found = {digest: mask for digest, mask in kept.items() if mask is not None}
    if found:
        share = float(np.mean([mask.mean() for mask in found.values()]))
        yield {"metric": "kept", "share": share, "file": trial.save("kept", **found)}


def summarised(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Returns kept: the share of a text's tokens to which its last one attends, mean over layers and KV heads."""
    return {m["metric"]: m["share"] for m in measurements if m["metric"] == "kept"}


def columns(rows: Sequence[ResultRow]) -> list[Column]:
    """Returns the column of `summarised`; none if no row has it."""
    note = "Tokens kept: those to which a text's last token attends, mean over layers and KV heads."
    column = Column("kept", "tokens kept, %", percent(), exact=True, note=note)
    return [column] * any(row.mean("kept") is not None for row in rows)
