"""Records of the engine's steps, for experiments and plots. Plain numbers."""

from __future__ import annotations

from typing import Any, NamedTuple


class StepRecord(NamedTuple):
    """Describes one step of the engine.

    ended_s: end time on the engine's clock. num_tokens: computed tokens. num_decodes: rows that computed one token.
    num_running, num_waiting: sequences after the step. blocks_in_use: after it, once invisible blocks are returned; not
    counting those that the step already submitted after it has taken; with num_scheduler_steps above 1, where the step
    after it was scheduled before its tokens were known, sequences that it ends still hold theirs. peak_blocks: when the
    step was scheduled.
    num_preemptions: since the engine started. unshared_blocks: blocks that running sequences would hold at the peak
    without sharing. cached_blocks: blocks kept for their content, without an owner. live_blocks: blocks_in_use and the
    blocks of the sequences that the step ends, which are released with it: the pool's blocks for the next tokens of
    all sequences, if they continue.

    Inputs of cost models (`ksana_jax.lab.simulator`), because the step's time depends on them:

    began_s: when it was submitted. The device computes it from then, or from the end of the step before it, until
    ended_s. schedule_s: the host's time before that, from the last record of a busy engine, or from the call of `step`.
    report_s: the host's time after ended_s, up to this record. compiled: whether a program was compiled for it.
    shape: its `StepShape`. num_chunks: rows that computed more than one token. num_sampled: padded number
    of tokens whose logits were computed. num_attended: sum over its tokens of the cached tokens up to each, itself
    included, as a mean over groups of layers; patterns that see fewer are not considered. num_saved, num_copied,
    num_loaded: blocks moved to the host, on the device and from the host.

    num_new_tokens: tokens that it has added to sequences, beams excluded.
    num_draft_tokens, num_accepted_tokens: draft tokens that it verified, and those among them that were accepted.
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
    began_s: float = 0.0
    schedule_s: float = 0.0
    report_s: float = 0.0
    compiled: bool = False
    shape: Any = None
    num_chunks: int = 0
    num_sampled: int = 0
    num_attended: int = 0
    num_saved: int = 0
    num_copied: int = 0
    num_loaded: int = 0
    num_new_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    live_blocks: int = 0

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens of the rows that computed more than one token of their sequence."""
        return self.num_tokens - self.num_decodes - self.num_draft_tokens

    def without_times(self) -> StepRecord:
        """Returns the record without its times: equal for equal decisions."""
        return self._replace(ended_s=0.0, began_s=0.0, schedule_s=0.0, report_s=0.0, compiled=False)
