"""What is checked and drawn before a request enters the engine. Changes nothing."""

from __future__ import annotations

import numpy as np

from ksana_jax.request import SamplingParams
from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.step.bias import bad_word_ids
from ksana_jax.tokenizers import Tokenizer


def check_request(
    prompt_token_ids: np.ndarray,
    params: SamplingParams,
    scheduler: Scheduler,
    *,
    vocab_size: int,
    max_model_len: int,
    tokenizer: Tokenizer | None,
    eos_ids: tuple[int, ...],
) -> None:
    """Checks that a request can be served.

    Raises:
      ValueError: it never can, with the numbers.
    """
    count = len(prompt_token_ids)
    if not count:
        raise ValueError("prompt is empty: at least one token is needed")
    if count >= max_model_len:
        raise ValueError(
            f"prompt has {count:,} tokens, max_model_len is {max_model_len:,} and leaves no token of output"
        )
    low, high = int(prompt_token_ids.min()), int(prompt_token_ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"prompt has token id {low if low < 0 else high}, ids go from 0 to {vocab_size - 1}")
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        if (ids := getattr(params, name)) and max(ids) >= vocab_size:
            raise ValueError(f"{name} has token id {max(ids)}, ids go from 0 to {vocab_size - 1}")
    bad = {ids[0] for ids in bad_word_ids(params.bad_words, tokenizer) if len(ids) == 1}
    if params.allowed_token_ids is not None:
        ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_ids)}
        if not set(params.allowed_token_ids) - bad - (ends if params.min_tokens else set()):
            raise ValueError("allowed_token_ids leaves no token: bad_words or min_tokens forbid all of them")
    if params.detokenize and tokenizer is None:
        raise ValueError("this engine has no tokenizer: set detokenize=False")
    if params.beam_width > scheduler.max_num_seqs:
        raise ValueError(f"beam_width is {params.beam_width}, max_num_seqs is {scheduler.max_num_seqs}")
    max_len = params.max_len(count, max_model_len)
    needed, blocks = scheduler.blocks_to_finish(max_len), scheduler.blocks
    needed *= max(params.beam_width, 1)  # beams wait for each other: all of them must fit, even unshared
    if needed > blocks.num_blocks:
        raise ValueError(
            f"prompt of {count:,} tokens and max_tokens {max_len - count:,} need {needed:,} KV blocks of "
            f"{blocks.block_size} tokens, the pool has {blocks.num_blocks:,}"
        )


def seed_of(params: SamplingParams, index: int, engine_seed: int, number: int) -> int:
    """Seed of one completion's random stream.

    Args:
      number: of the request; requests without a seed of their own draw one from it and the engine's seed.
    """
    if params.seed is None:
        parts = (engine_seed & (2**64 - 1), number)
    elif index == 0:
        return params.seed & (2**64 - 1)
    else:
        parts = (params.seed & (2**64 - 1),)
    return int(np.random.SeedSequence((*parts, index)).generate_state(1, np.uint64)[0])
