"""What a step was, for experiments and plots. Plain numbers."""

from __future__ import annotations

from typing import NamedTuple


class StepRecord(NamedTuple):
    """One step of the engine.

    ended_s: on the engine's clock. num_tokens: computed. num_decodes: rows that computed one token.
    num_running, num_waiting: sequences after the step. blocks_in_use: after it, once invisible blocks are returned.
    peak_blocks: during the step. num_preemptions: since the engine started. unshared_blocks: what running sequences
    would hold at the peak if each had its own. cached_blocks: kept for what they hold, without an owner.
    """

    ended_s: float
    num_tokens: int
    num_decodes: int
    num_running: int
    num_waiting: int
    blocks_in_use: int
    peak_blocks: int
    num_preemptions: int
    unshared_blocks: int = 0
    cached_blocks: int = 0
