"""Records of the engine's steps, for experiments and plots. Plain numbers."""

from __future__ import annotations

from typing import NamedTuple


class StepRecord(NamedTuple):
    """Describes one step of the engine.

    ended_s: end time on the engine's clock. num_tokens: computed tokens. num_decodes: rows that computed one token.
    num_running, num_waiting: sequences after the step. blocks_in_use: after it, once invisible blocks are returned; not
    counting those that the step already submitted after it has taken; with num_scheduler_steps above 1, where the step
    after it was scheduled before its tokens were known, sequences that it ends still hold theirs. peak_blocks: when the
    step was scheduled.
    num_preemptions: since the engine started. unshared_blocks: blocks that running sequences would hold at the peak
    without sharing. cached_blocks: blocks kept for their content, without an owner.
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
