"""The answers of simulated requests. Their true lengths are known only here: schedulers and routers never see them.

An answer's last token is the model's end of sequence, so that the engine learns of its end as it does on a device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from ksana_jax.scheduler.sequence import Rows, Sequence
from ksana_jax.scheduler.step.types import ScheduledBatch


@dataclasses.dataclass(eq=False)
class PlannedAnswer:
    """The predetermined answer to a request.

    tokens: [n] int32; the end of sequence replaces the last one.
    scheduled_s: when a step with the request was first built; NaN before.
    """

    tokens: np.ndarray
    scheduled_s: float = math.nan


class Answers:
    """Decides which tokens the steps of one engine sample.

    A token depends on the request and its position in the sequence, not on the batch: a preempted request resumes with
    the same tokens.

    Args:
      num_rows: of the engine. eos_ids: of the model.
      clock: times the first scheduling of requests.

    Attributes:
      computing: ids of scheduled requests, in order; the reporter of their first tokens removes them.

    Raises:
      ValueError: the model has no end of sequence.
    """

    def __init__(self, num_rows: int, eos_ids: tuple[int, ...], clock: Callable[[], float]):
        if not eos_ids:
            raise ValueError("the model has no eos_token_id, with which simulated answers end")
        self._eos_ids, self._clock = eos_ids, clock
        self._other = next(token for token in range(len(eos_ids) + 1) if token not in eos_ids)
        self.computing: dict[str, None] = {}
        self._answers: dict[str, PlannedAnswer] = {}
        self._seqs: list[Sequence | None] = [None] * num_rows
        self._num_prompt = np.zeros(num_rows, np.int64)
        self._last = np.zeros(num_rows, np.int64)
        self._texts = np.zeros((num_rows, 64), np.int32)
        self._running: np.ndarray | None = None

    def expect(self, request_id: str, answer: PlannedAnswer) -> None:
        """Sets a request's answer, before a step with it is built."""
        self._answers[request_id] = answer

    def forget(self, request_id: str) -> None:
        """Drops the answer of a request that has ended."""
        self._answers.pop(request_id, None)

    def of(self, batch: ScheduledBatch, lengths: np.ndarray, rows: Rows) -> np.ndarray:
        """Returns the next token of each sampled row of a step.

        Args:
          lengths: tokens that each of `batch.rows` has computed after the step.
        """
        running = batch.rows
        if running is not self._running:  # the same array stands for the same sequences
            self._look(running, rows)
            self._running = running
        sampled = running
        if batch.samples is not None:
            sampled, lengths = running[batch.samples], lengths[batch.samples]
        # A step ahead may still compute a row that the one before it ends.
        at = np.minimum(lengths - self._num_prompt[sampled], self._last[sampled])
        return self._texts[sampled, at]

    def _look(self, running: np.ndarray, rows: Rows) -> None:
        """Updates the requests of reused rows."""
        for row in running.tolist():
            seq = rows.seqs[row]
            if seq is self._seqs[row]:
                continue
            assert seq is not None
            answer = self._answers[seq.request_id]
            if math.isnan(answer.scheduled_s):
                answer.scheduled_s = self._clock()
                self.computing[seq.request_id] = None
            self._seqs[row] = seq
            self._num_prompt[row], self._last[row] = seq.num_prompt, len(answer.tokens) - 1
            self._write(row, answer.tokens)

    def _write(self, row: int, tokens: np.ndarray) -> None:
        count, width = len(tokens), self._texts.shape[1]
        if count > width:
            self._texts = np.pad(self._texts, ((0, 0), (0, max(count - width, width))))
        text = self._texts[row]
        text[:count] = tokens
        text[:count][np.isin(tokens, self._eos_ids)] = self._other
        text[count - 1] = self._eos_ids[0]
