"""Sliding window with recomputation: each token is predicted by a fresh run over the `window` tokens before it, at
positions from 0, with no cache between tokens. The slow baseline of papers on windows and sinks (StreamingLLM,
arXiv:2309.17453, figure 1c)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ksana_jax.core.request import SamplingParams
from ksana_jax.engine.llm import LLM


def score(llm: LLM, token_ids: Sequence[int], window: int, positions: Sequence[int]) -> np.ndarray:
    """Computes the log-probability of token_ids[t] for each t in positions, given the `window` tokens before it.

    Args:
      llm: an LLM whose attention pattern sees the whole window.
      positions: at least 1.

    Returns:
      [len(positions)] float64, in nats.
    """
    ids = np.asarray(token_ids)
    prompts = [{"prompt_token_ids": ids[max(t - window, 0) : t + 1]} for t in positions]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    outputs = [output.check() for output in llm.generate(prompts, params)]
    last = [(o.prompt_logprobs or [{}])[-1] or {} for o in outputs]
    return np.array([entry[int(ids[t])].logprob for entry, t in zip(last, positions, strict=True)])


def generate(llm: LLM, token_ids: Sequence[int], window: int, num_tokens: int) -> list[int]:
    """Generates num_tokens tokens greedily, each from a fresh run over the last `window` tokens."""
    ids = [int(t) for t in token_ids]
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)
    for _ in range(num_tokens):
        [output] = llm.generate({"prompt_token_ids": ids[-window:]}, params)
        ids.append(output.check().outputs[0].token_ids[0])
    return ids[len(token_ids) :]
