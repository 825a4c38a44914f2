"""Measurements on an engine: outputs of exact lengths, scores of given tokens, and times of warm runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ksana_jax import LLM, SamplingParams
    from ksana_jax.core.outputs import Logprob

T = TypeVar("T")


def forced(output_tokens: int, **given: Any) -> SamplingParams:
    """Returns parameters for an output of exactly output_tokens tokens, without text."""
    from ksana_jax import SamplingParams

    return SamplingParams(max_tokens=output_tokens, ignore_eos=True, detokenize=False, **given)


def token_scores(llm: LLM, prompts: Sequence[Mapping[str, Any]], kept: list[Any] | None = None) -> list[list[Logprob]]:
    """Returns the log-probability and rank of each token of each prompt but its first, given the tokens before it.

    Args:
      prompts: for `LLM.generate`, as token ids; a question's come last.
      kept: a list that becomes the `kept_tokens` of each prompt.
    """
    params, found = forced(1, temperature=0.0, prompt_logprobs=0), []
    outputs = llm.generate(list(prompts), params)
    if kept is not None:
        kept[:] = [output.outputs[0].kept_tokens for output in outputs]
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = [*prompt["prompt_token_ids"], *prompt.get("question_token_ids", ())]
        entries = output.check().prompt_logprobs
        assert entries is not None and len(entries) == len(ids)
        scored = zip(entries[1:], ids[1:], strict=True)
        found.append([entry[token] for entry, token in scored if entry is not None])
    return found


def run_warm(llm: LLM, work: Callable[[], T]) -> tuple[T, float, int]:
    """Runs work on an engine, and again if it compiled something, so that compilation is not timed.

    Returns:
      its result, its seconds, and the compilations in them: 0 unless the second run compiled too. The engine's records
      are this run's.
    """
    found = _run_timed(llm, work)
    return _run_timed(llm, work) if found[2] else found


def _run_timed(llm: LLM, work: Callable[[], T]) -> tuple[T, float, int]:
    llm.clear_records()
    before, began = llm.num_compilations, time.perf_counter()
    result = work()
    return result, time.perf_counter() - began, llm.num_compilations - before
