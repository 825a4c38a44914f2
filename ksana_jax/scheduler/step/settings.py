"""Sampling settings: of the rows that do more than take greedy tokens, and of a step's tokens as arrays. No jax."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ksana_jax.core.request import SamplingParams


class SamplingArrays(NamedTuple):
    """Sampling settings [n] of the first n sampled tokens, NumPy or jax; see `SamplingParams`. Padding has defaults.

    seeds: [n, 2] uint32, high and low word. num_outputs: [n] tokens already generated, the random stream's position.
    forced: [n] int32, the id that is taken whatever its score; -1 for none.
    counts: [n, V] int32, times each token was generated; None if no row has penalties or biases.
    in_prompt: [n, V] bool, or None as for counts. bias: [n, V] float32, added to the logits, or None as for counts.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seeds: Any
    num_outputs: Any
    repetition_penalty: Any
    presence_penalty: Any
    frequency_penalty: Any
    forced: Any
    counts: Any = None
    in_prompt: Any = None
    bias: Any = None


# Values for rows and padding without settings.
_DEFAULTS = (0, 0, 1, 0, 0, 0, 1, 0, 0, -1)


ALL_LOGPROBS = 2**31 - 1  # as many as there are ids


def num_logprobs(params: SamplingParams) -> int:
    """Returns the number of top tokens whose log-probabilities a request gets; -1 for none."""
    return -1 if params.logprobs is None else ALL_LOGPROBS if params.logprobs < 0 else params.logprobs


class RowSettings:
    """Settings of those of R rows that ask for more than greedy tokens; the others have defaults.

    columns: [R] each, of which num_outputs and forced are not used. forced: {row: its forced tokens}. samples, dense:
    [R] True if a row needs settings, and if it needs penalties or biases. pools: [R] True if a row's prompt is pooled.
    num_logprobs, num_prompt_logprobs: [R] -1
    for none. num_asking, num_dense: numbers of rows. matchers: {row: the `masks.Matcher` of its grammar}.
    """

    def __init__(self, num_rows: int):
        f32, i32 = np.zeros(num_rows, np.float32), np.zeros(num_rows, np.int32)
        columns = (f32, i32, f32, f32, np.zeros((num_rows, 2), np.uint32), i32, f32, f32, f32, i32)
        self.columns = SamplingArrays(*(np.full_like(like, x) for like, x in zip(columns, _DEFAULTS, strict=True)))
        self.samples, self.dense, self.pools = np.zeros((3, num_rows), bool)
        self.num_logprobs, self.num_prompt_logprobs = i32 - 1, i32 - 1
        self.num_asking = self.num_dense = 0
        self.forced: dict[int, np.ndarray] = {}
        self.matchers: dict[int, Any] = {}

    def place(self, row: int, p: SamplingParams, seed: int, dense: bool, matcher: Any = None) -> None:
        """Writes the settings of a row's sequence."""
        self.num_asking += 1
        self.num_dense += dense
        if matcher is not None:
            self.matchers[row] = matcher
        words = (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF
        penalties = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
        temperature, forces = p.temperature, p.forced_token_ids is not None
        if forces:
            temperature, self.forced[row] = 0, np.array(p.forced_token_ids, np.int32)
        self._write(row, (temperature, p.top_k, p.top_p, p.min_p, words, 0, *penalties))
        self.samples[row], self.dense[row] = not p.greedy or dense or forces, dense
        self.num_logprobs[row] = num_logprobs(p)
        self.num_prompt_logprobs[row] = -1 if p.prompt_logprobs is None else p.prompt_logprobs

    def clear(self, row: int) -> None:
        """Gives a row the defaults again."""
        self.num_asking -= 1
        self.num_dense -= int(self.dense[row])
        self.forced.pop(row, None)
        self.matchers.pop(row, None)
        self._write(row, _DEFAULTS)
        self.samples[row] = self.dense[row] = self.pools[row] = False
        self.num_logprobs[row] = self.num_prompt_logprobs[row] = -1

    def _write(self, row: int, values: tuple[Any, ...]) -> None:
        for column, value in zip(self.columns[: len(values)], values, strict=True):
            column[row] = value

    def forced_tokens(self, rows: np.ndarray, num_outputs: np.ndarray) -> np.ndarray:
        """Returns `SamplingArrays.forced` of n tokens; arguments as of `of_tokens`."""
        found = np.full(len(rows), -1, np.int32)
        if self.forced:
            for i, (row, nth) in enumerate(zip(rows.tolist(), num_outputs.tolist(), strict=True)):
                if (ids := self.forced.get(row)) is not None and nth < len(ids):
                    found[i] = ids[nth]
        return found

    def advanced(self, last: SamplingArrays, rows: np.ndarray, real: np.ndarray) -> SamplingArrays:
        """Returns the settings of the next decodes of rows [n], after those of their last ones.

        Args:
          real: [at least the size of last] 1 for decodes, 0 for padding.
        """
        num_outputs = last.num_outputs + real[: len(last.num_outputs)]
        if not self.forced:
            return last._replace(num_outputs=num_outputs)
        forced = np.full_like(last.forced, -1)
        forced[: len(rows)] = self.forced_tokens(rows, num_outputs[: len(rows)])
        return last._replace(num_outputs=num_outputs, forced=forced)

    def of_tokens(self, rows: np.ndarray, num_outputs: np.ndarray, size: int) -> SamplingArrays:
        """Returns the settings of n tokens, padded to `size`, without penalties and biases.

        Args:
          rows: [n] of each token. num_outputs: [n], see `SamplingArrays`.
        """
        own = {"num_outputs": num_outputs, "forced": self.forced_tokens(rows, num_outputs)}
        found = []
        for name, column, default in zip(SamplingArrays._fields, self.columns, _DEFAULTS, strict=False):
            values = own[name] if name in own else column[rows]
            found.append(np.full((size, *values.shape[1:]), default, values.dtype))
            found[-1][: len(values)] = values
        return SamplingArrays(*found)
