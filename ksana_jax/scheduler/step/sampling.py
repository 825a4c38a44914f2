"""The sampling settings of a step's tokens as arrays, for rows that ask for more than greedy tokens. No jax."""

from __future__ import annotations

import numpy as np

from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.step.bias import bias_of
from ksana_jax.scheduler.step.types import SamplingArrays, StepInput

_NO_TOKENS = np.zeros(0, np.int32)


def sampling_arrays(rows: Rows, sampled: np.ndarray, step: StepInput, vocab_size: int) -> SamplingArrays:
    """Returns the settings of a step's sampled tokens; with drafts each row's for its whole tile."""
    size, width = step.num_sampled, 1 if step.drafts is None else step.shape.parts[0].width
    of_tokens, nth = np.repeat(sampled, width), np.tile(np.arange(width, dtype=np.int32), len(sampled))
    if step.shape.tree:
        assert step.drafts is not None
        nth = np.pad(step.drafts.depths()[: len(sampled)], ((0, 0), (1, 0))).reshape(-1)

    def fill(values: np.ndarray, default: float) -> np.ndarray:
        found = np.full((size, *values.shape[1:]), default, values.dtype)
        found[: len(values)] = values
        return found

    settings = SamplingArrays(
        temperature=fill(rows.temperature[of_tokens], 0),
        top_k=fill(rows.top_k[of_tokens], 0),
        top_p=fill(rows.top_p[of_tokens], 1),
        min_p=fill(rows.min_p[of_tokens], 0),
        seeds=fill(rows.seeds[of_tokens], 0),
        num_outputs=fill((rows.num_tokens - rows.num_prompt)[of_tokens] + nth, 0),
        repetition_penalty=fill(rows.repetition_penalty[of_tokens], 1),
        presence_penalty=fill(rows.presence_penalty[of_tokens], 0),
        frequency_penalty=fill(rows.frequency_penalty[of_tokens], 0),
    )
    if not rows.dense[sampled].any():
        return settings
    counts = np.zeros((size, vocab_size), np.int32)
    in_prompt = np.zeros((size, vocab_size), bool)
    bias = np.zeros((size, vocab_size), np.float32)
    for place, row in enumerate(sampled.tolist()):
        seq = rows.seqs[row]
        if seq is None or not rows.dense[row]:
            continue
        split, end = seq.num_prompt, int(rows.num_tokens[row])
        runs = [_NO_TOKENS] if step.drafts is None else step.drafts.runs(place)
        for at, run in enumerate(runs, place * width):
            output = np.append(rows.token_ids[row, split:end], run)
            in_prompt[at, rows.token_ids[row, :split]] = True
            counts[at] = np.bincount(output, minlength=vocab_size)
            bias[at] = bias_of(seq.params, seq.bad_words, seq.stop_ids, output, vocab_size)
    return settings._replace(counts=counts, in_prompt=in_prompt, bias=bias)
