"""Settings of a step for rows that ask for more than greedy tokens: sampling, log-probabilities. No jax."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ksana_jax.core.request import SamplingParams
from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.step.settings import SamplingArrays
from ksana_jax.scheduler.step.types import ScheduledBatch, StepInput

if TYPE_CHECKING:
    from ksana_jax.tokenizers import Tokenizer

_NO_TOKENS = np.zeros(0, np.int32)


def add_settings(step: StepInput, batch: ScheduledBatch, rows: Rows, ends: np.ndarray, vocab_size: int) -> None:
    """Fills in sampling settings and log-probabilities that the rows need beyond greedy tokens."""
    running, sampled = batch.rows, batch.sampled
    if rows.settings.samples[sampled].any():
        step.sampling = sampling_arrays(rows, sampled, step, vocab_size)
    num_logprobs = int(rows.settings.num_logprobs[sampled].max(initial=-1))
    step.num_logprobs = None if num_logprobs < 0 else num_logprobs
    step.pools = bool((rows.settings.pools[running] & (rows.num_computed[running] < rows.num_prompt[running])).any())
    scored = rows.settings.num_prompt_logprobs[running] >= 0
    if not scored.any():
        return
    # A token is scored where the previous one is computed.
    scored &= rows.num_computed[running] + 1 < rows.num_prompt[running]
    if not scored.any():
        return
    step.num_prompt_logprobs = int(rows.settings.num_prompt_logprobs[running[scored]].max())
    step.targets = np.full(step.shape.num_tokens, -1, np.int32)
    for row, count, end in zip(running[scored], batch.num_per_row[scored], ends[scored], strict=True):
        start = int(rows.num_computed[row])
        known = min(int(count), int(rows.num_prompt[row]) - 1 - start)
        token = end + 1 - count
        step.targets[token : token + known] = rows.token_ids[row, start + 1 : start + 1 + known]


def sampling_arrays(rows: Rows, sampled: np.ndarray, step: StepInput, vocab_size: int) -> SamplingArrays:
    """Returns the settings of a step's sampled tokens; with drafts each row's for its whole tile."""
    size, width = step.num_sampled, 1 if step.drafts is None else step.shape.parts[0].width
    of_tokens, nth = np.repeat(sampled, width), np.tile(np.arange(width, dtype=np.int32), len(sampled))
    if step.shape.tree:
        assert step.drafts is not None
        nth = np.pad(step.drafts.depths()[: len(sampled)], ((0, 0), (1, 0))).reshape(-1)

    settings = rows.settings.of_tokens(of_tokens, (rows.num_tokens - rows.num_prompt)[of_tokens] + nth, size)
    if not rows.settings.dense[sampled].any():
        return settings
    counts = np.zeros((size, vocab_size), np.int32)
    in_prompt = np.zeros((size, vocab_size), bool)
    bias = np.zeros((size, vocab_size), np.float32)
    for place, row in enumerate(sampled.tolist()):
        seq = rows.seqs[row]
        if seq is None or not rows.settings.dense[row]:
            continue
        split, end = seq.num_prompt, int(rows.num_tokens[row])
        runs = [_NO_TOKENS] if step.drafts is None else step.drafts.runs(place)
        for at, run in enumerate(runs, place * width):
            output = np.append(rows.token_ids[row, split:end], run)
            in_prompt[at, rows.token_ids[row, :split]] = True
            counts[at] = np.bincount(output, minlength=vocab_size)
            bias[at] = bias_of(seq.params, seq.bad_words, seq.stop_ids, output, vocab_size)
    return settings._replace(counts=counts, in_prompt=in_prompt, bias=bias)


def bias_of(
    params: SamplingParams,
    bad_words: Iterable[tuple[int, ...]],
    stop_ids: Sequence[int],
    output: np.ndarray,
    vocab_size: int,
) -> np.ndarray:
    """Returns the bias [V] to add to the scores of the next token; -inf for forbidden tokens.

    Args:
      bad_words: token ids of each way to write `params.bad_words`.
      stop_ids: ids that end the output.
      output: tokens generated so far.
    """
    bias = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(params.allowed_token_ids)] = 0
    for token, value in (params.logit_bias or {}).items():
        bias[token] += value
    for *before, last in bad_words:
        # If "x y" is bad, y must not follow x.
        if len(before) <= len(output) and output[len(output) - len(before) :].tolist() == before:
            bias[last] = -np.inf
    if len(output) < params.min_tokens:
        bias[list(stop_ids)] = -np.inf
    return bias


def bad_word_ids(words: Sequence[str] | None, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of words as a tokenizer writes them at the start of a text and after a space.

    Raises:
      ValueError: no tokenizer is given, or its vocabulary cannot express a word.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise ValueError("this engine has no tokenizer, which bad_words need; logit_bias takes token ids")
    spellings = (
        tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for word in words for space in ("", " ")
    )
    return tuple(dict.fromkeys(tuple(ids) for ids in spellings if ids))
