"""Log-likelihoods of token ids on an engine. Knows no tokenizer and no evaluation harness.

Each sequence is one request, whose tokens are scored as its prompt, in chunks through the engine's pool: a window and
sinks limit what each prediction attends to, as they do for generated text. So does kv_eviction that evicts while a
prompt is computed; one that waits for its end is refused, because all scores would equal the full cache's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ksana_jax.core.errors import ConfigError

if TYPE_CHECKING:
    from ksana_jax import LLM

# Requests are submitted in groups of up to this many tokens: the engine keeps about 350 bytes for each scored token
# until its request ends.
GROUP_TOKENS = 1 << 20


class ScoredIds(NamedTuple):
    """Token ids; the last num_scored of them are scored. 0 <= num_scored < len(ids)."""

    ids: Sequence[int]
    num_scored: int


class Score(NamedTuple):
    """Sum of log-probabilities in nats, and whether each scored token was the most probable."""

    logprob: float
    greedy: bool


def max_part_tokens(llm: LLM) -> int:
    """Returns the number of tokens of the longest part: the engine also samples one token after it."""
    return llm.engine.max_model_len - 1


def score(llm: LLM, parts: Sequence[ScoredIds], on_group: Callable[[int], object] = lambda count: None) -> list[Score]:
    """Scores parts of any lengths; the engine batches them.

    Args:
      on_group: called with the number of parts done since its last call.

    Raises:
      ConfigError: kv_eviction evicts, or kv_selection selects, only once a prompt is complete.
      ValueError: a part is longer than `max_part_tokens`.
      FloatingPointError: a log-probability is not finite.
    """
    from ksana_jax import SamplingParams

    eviction = llm.engine.scheduler.layout.eviction
    if eviction is not None and eviction.method.prompts != "streamed":
        raise ConfigError(
            f"kv_eviction with prompts {eviction.method.prompts!r} evicts only after a prompt, so it would not act on "
            "scored tokens: set prompts to 'streamed'"
        )
    selection = llm.engine.scheduler.layout.selection
    if selection is not None and selection.prompts != "streamed":
        raise ConfigError(
            f"kv_selection with prompts {selection.prompts!r} selects only after a prompt, so it would not act on "
            "scored tokens: set prompts to 'streamed'"
        )
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    scores = [Score(0.0, True)] * len(parts)
    for group in groups([len(part.ids) if part.num_scored else 0 for part in parts], GROUP_TOKENS):
        prompts = [{"prompt_token_ids": list(parts[i].ids)} for i in group]
        for i, output in zip(group, llm.generate(prompts, params), strict=True):
            entries = output.check().prompt_logprobs or []
            ids, first = output.prompt_token_ids, len(parts[i].ids) - parts[i].num_scored
            found = [(entries[t] or {})[ids[t]] for t in range(first, len(ids))]
            total = math.fsum(entry.logprob for entry in found)
            if not math.isfinite(total):
                raise FloatingPointError(f"the log-likelihood of {len(found):,} tokens is {total}")
            scores[i] = Score(total, all(entry.rank == 1 for entry in found))
        on_group(len(group))
    return scores


def groups(num_tokens: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Yields indices of sequences, longest first, in groups of at most `limit` tokens or a single sequence.

    Sequences of 0 tokens are left out.
    """
    group: list[int] = []
    total = 0
    for i in sorted((i for i, count in enumerate(num_tokens) if count), key=lambda i: -num_tokens[i]):
        if group and total + num_tokens[i] > limit:
            yield group
            group, total = [], 0
        group.append(i)
        total += num_tokens[i]
    if group:
        yield group


def fitted(context: Sequence[int], continuation: Sequence[int], max_tokens: int) -> ScoredIds:
    """Returns context and continuation as a part of at most max_tokens tokens; the context loses its first tokens.

    Raises:
      ValueError: the continuation and one token of context do not fit.
    """
    if len(continuation) >= max_tokens:
        raise ValueError(
            f"a continuation has {len(continuation):,} tokens; with a token of context and one of output it needs "
            f"max_model_len {len(continuation) + 2:,}, which is {max_tokens + 1:,}"
        )
    return ScoredIds([*context, *continuation][-max_tokens:], len(continuation))


def windows(ids: Sequence[int], max_tokens: int) -> Iterator[ScoredIds]:
    """Splits a text for a rolling log-likelihood: one part if it fits, otherwise parts of max_tokens tokens.

    Each token after the first is scored once: in later parts after one token of context, in the last part, which is
    filled up from the left, after more. This is the definition of lm-evaluation-harness.
    """
    end = min(max_tokens, len(ids))
    yield ScoredIds(ids[:end], max(end - 1, 0))
    while end < len(ids):
        count = min(len(ids) - end, max_tokens - 1)
        end += count
        yield ScoredIds(ids[end - max_tokens : end], count)
