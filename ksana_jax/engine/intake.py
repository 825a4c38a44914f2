"""Makes requests and their sequences, checked and numbered, before they enter the engine. Knows no steps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container

import numpy as np

from ksana_jax.engine.beam import Beams, num_candidates
from ksana_jax.engine.completion import Completion, Request
from ksana_jax.kv.state import KVState
from ksana_jax.request import RequestMetrics, SamplingParams
from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.sequence import Sequence
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


class Intake:
    """Makes the requests of one engine.

    Args:
      tokenizer: None makes no text.
      eos_ids: end-of-sequence ids of the model.
      max_model_len: most tokens of a sequence, prompt included.
      seed: from which requests draw theirs if they have none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        eos_ids: tuple[int, ...],
        max_model_len: int,
        seed: int,
    ):
        self.tokenizer, self.eos_ids, self.max_model_len = tokenizer, eos_ids, max_model_len
        self._seed = seed
        self._request_numbers, self._seq_ids = itertools.count(), itertools.count()

    def new_request(
        self,
        prompt_token_ids: np.ndarray,
        params: SamplingParams,
        *,
        arrival_s: float,
        taken: Container[str],
        prompt: str | None = None,
        request_id: str | None = None,
        cache_salt: str = "",
        streams: bool = False,
    ) -> Request:
        """Makes a request that has been checked; see `Engine.new_request`.

        Args:
          taken: ids that it must not be given.
        """
        prompt_token_ids, number = prompt_token_ids.astype(np.int32), next(self._request_numbers)
        if request_id is None:
            request_id = f"request-{number}"
            while request_id in taken:  # a user chose a name like ours
                request_id += "'"
        request = Request(request_id, prompt, prompt_token_ids, params, RequestMetrics(arrival_s))
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        for index in range(params.n):
            seed = seed_of(params, index, self._seed, number)
            seq = self._new_sequence(request, prompt_token_ids, index, cache_salt, seed)
            given = self.tokenizer if params.detokenize else None
            request.completions.append(Completion(index, seq, given, streams and not params.beam_width))
        if params.beam_width:
            leader = self.new_beam(request, prompt_token_ids, cache_salt)
            width, penalty, stop_ids = params.beam_width, params.length_penalty, leader.stop_ids
            request.beams = Beams(width, penalty, stop_ids, leader.max_len, leader.num_prompt, {leader: 0.0})
        else:
            leader, *leader.forks = [completion.seq for completion in request.completions]
        return request

    def _new_sequence(self, request: Request, token_ids: np.ndarray, index: int, salt: str, seed: int = 0) -> Sequence:
        params, count = request.params, len(request.prompt_token_ids)
        stop_ids = tuple(params.stop_token_ids or ()) + (() if params.ignore_eos else self.eos_ids)
        return Sequence(
            seq_id=next(self._seq_ids),
            token_ids=token_ids,
            params=params if index == 0 else dataclasses.replace(params, prompt_logprobs=None),
            stop_ids=tuple(dict.fromkeys(stop_ids)),
            max_len=params.max_len(count, self.max_model_len),
            seed=seed,
            owner=request,
            request_id=request.request_id,
            index=index,
            bad_words=bad_word_ids(params.bad_words, self.tokenizer),
            kv=KVState(salt, request.metrics.num_blocks_by_origin),
        )

    def new_beam(self, request: Request, token_ids: np.ndarray, salt: str) -> Sequence:
        """Makes a beam of a request: its prompt, or a continuation of it."""
        seq = self._new_sequence(request, token_ids, 0, salt)
        count = num_candidates(request.params.beam_width, seq.stop_ids)
        seq.params = SamplingParams(temperature=0, logprobs=count, max_tokens=request.params.max_tokens)
        seq.is_beam, seq.num_prompt, seq.index = True, len(request.prompt_token_ids), seq.seq_id
        return seq
