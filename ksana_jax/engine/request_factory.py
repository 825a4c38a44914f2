"""Checks and numbers new requests and their sequences before they enter the engine. Knows no steps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.errors import ContextLengthError
from ksana_jax.core.lora import salted
from ksana_jax.core.outputs import RequestMetrics
from ksana_jax.core.request import RequestInput, SamplingParams
from ksana_jax.engine.beam import Beams, num_candidates
from ksana_jax.engine.completion import Completion, Request
from ksana_jax.engine.evicting_requests import check_eviction
from ksana_jax.engine.watched import WatchedCompletion, check_distributions, special_stops
from ksana_jax.kv.state import KVState
from ksana_jax.methods.steering import check_steering
from ksana_jax.sampling.grammar import Grammars
from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.scheduler.sequence import Sequence
from ksana_jax.scheduler.step.sampling import bad_word_ids
from ksana_jax.tokenizers import Tokenizer

if TYPE_CHECKING:
    from ksana_jax.core.lora import LoRARequest
    from ksana_jax.engine.adapters import Adapters
    from ksana_jax.scheduler.adapters import AdapterUse

# Token ids of each way to write the words that a request never completes.
BadWords: TypeAlias = tuple[tuple[int, ...], ...]


def seed_of(params: SamplingParams, index: int, engine_seed: int, number: int) -> int:
    """Returns the seed of one completion's random stream.

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


def ending_ids(model: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Returns the ids that end an output: the model's, and the tokenizer's that have a row in the embedding."""
    more = () if tokenizer is None else tokenizer.eos_ids
    return tuple(dict.fromkeys((*model.eos_ids, *(i for i in more if i < model.vocab_size))))


class RequestFactory:
    """Checks and creates the requests of one engine.

    Args:
      scheduler: its rows and its pool must be able to hold them.
      model: token ids are checked against its vocabulary. tokenizer: None makes no text.
      seed: from which requests draw theirs if they have none.

    Attributes:
      adapters: of the engine; None without `enable_lora`. grammars: that requests have asked for.
    """

    def __init__(self, scheduler: Scheduler, model: ModelConfig, tokenizer: Tokenizer | None, seed: int):
        self.scheduler, self.tokenizer = scheduler, tokenizer
        self._model, self._vocab_size, self._seed = model, model.vocab_size, seed
        self.adapters: Adapters | None = None
        self.eos_ids = ending_ids(model, tokenizer)
        self.grammars = Grammars(tokenizer, model.vocab_size, self.eos_ids)
        self._request_numbers, self._seq_ids = itertools.count(), itertools.count()

    def new_requests(
        self, asked: Seq[RequestInput], *, clock: Callable[[], float], taken: Container[str]
    ) -> list[Request]:
        """Creates requests, all or none.

        Args:
          clock: asked for the arrival of each.
          taken: ids that none may be given.

        Raises:
          ValueError: one of them can never be served, with the numbers.
        """
        checked = [self._check(one) for one in asked]
        return [self._new_request(one, words, clock(), taken) for one, words in checked]

    def _check(self, asked: RequestInput) -> tuple[RequestInput, BadWords]:
        """Checks that a request can be served; returns it, and the token ids of its bad words."""
        ids, params, max_model_len = asked.prompt_token_ids, asked.params, self.scheduler.max_model_len
        count = len(ids)
        if not count:
            raise ValueError("prompt is empty: at least one token is needed")
        if count >= max_model_len:
            raise ContextLengthError(
                f"prompt has {count:,} tokens, max_model_len is {max_model_len:,} and leaves no token of output"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocab_size:
            raise ValueError(f"prompt has token id {low if low < 0 else high}, ids go from 0 to {self._vocab_size - 1}")
        bad_words = self._check_params(params)
        if params.detokenize and self.tokenizer is None:
            raise ValueError("this engine has no tokenizer: set detokenize=False")
        if self.scheduler.layout.eviction is not None:
            asked = check_eviction(asked, self.scheduler)
        self._check_room(count, asked.num_question, params)
        if asked.lora_request is not None:
            self.adapter_of(asked.lora_request)
        return asked, bad_words

    def adapter_of(self, asked: LoRARequest) -> AdapterUse:
        """Returns the adapter that a request names, read if need be; raises ValueError if it cannot be used."""
        if self.adapters is None:
            raise ValueError("this engine takes no adapters: a lora_request needs enable_lora=True")
        return self.adapters.use(asked)

    def _check_params(self, params: SamplingParams) -> BadWords:
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "forced_token_ids"):
            if (ids := getattr(params, name)) and max(ids) >= self._vocab_size:
                raise ValueError(f"{name} has token id {max(ids)}, ids go from 0 to {self._vocab_size - 1}")
        if params.steering is not None:
            check_steering(params.steering, self._model)
        if params.stop is not None:
            special_stops(params, self.tokenizer)
        spellings = bad_word_ids(params.bad_words, self.tokenizer) if params.bad_words else ()
        # A spelling with an id that has no row in the embedding is never generated.
        bad_words = tuple(ids for ids in spellings if max(ids) < self._vocab_size)
        if params.structured_outputs is not None:
            self.grammars.matcher(params.structured_outputs)
        if params.allowed_token_ids is not None:
            bad = {ids[0] for ids in bad_words if len(ids) == 1}
            ends = set(self._stop_ids(params)) if params.min_tokens else set()
            if (bad | ends).issuperset(params.allowed_token_ids):
                raise ValueError("allowed_token_ids leaves no token: bad_words or min_tokens forbid all of them")
        return bad_words

    def _check_room(self, count: int, num_question: int, params: SamplingParams) -> None:
        """Checks that rows and pool have room for a prompt of `count` tokens, its question included."""
        if not 0 <= num_question < count:
            raise ValueError(
                f"question has {num_question:,} of {count:,} prompt tokens, must leave at least one before it"
            )
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        if params.beam_width > scheduler.max_num_seqs:
            raise ValueError(f"beam_width is {params.beam_width}, max_num_seqs is {scheduler.max_num_seqs}")
        max_len = params.max_len(count, scheduler.max_model_len)
        if params.logprobs == -1:
            check_distributions(params.n * (max_len - count), self._vocab_size)
        # Beams wait for each other: all of them must fit, even unshared.
        width = max(params.beam_width, 1)
        if width * len(scheduler.layout.groups) * -(-max_len // blocks.block_size) <= blocks.num_blocks:
            return  # windows and evictions need fewer blocks than whole sequences
        needed = width * scheduler.layout.blocks_to_finish(max_len, count - num_question)
        if needed > blocks.num_blocks:
            raise ContextLengthError(
                f"prompt of {count:,} tokens and max_tokens {max_len - count:,} need {needed:,} KV blocks of "
                f"{blocks.block_size} tokens, the pool has {blocks.num_blocks:,}"
            )

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        eos_ids = () if params.ignore_eos or params.forced_token_ids else self.eos_ids
        return tuple(dict.fromkeys((*(params.stop_token_ids or ()), *eos_ids)))

    def _new_request(
        self, asked: RequestInput, bad_words: BadWords, arrival_s: float, taken: Container[str]
    ) -> Request:
        params, number = asked.params, next(self._request_numbers)
        request_id, token_ids = asked.request_id, asked.prompt_token_ids.astype(np.int32)
        if request_id is None:
            request_id = f"request-{number}"
            while request_id in taken:  # a user chose a name like ours
                request_id += "'"
        request = Request(request_id, asked.prompt, token_ids, params, RequestMetrics(arrival_s))
        salt = asked.cache_salt
        if asked.lora_request is not None:
            request.adapter = self.adapter_of(asked.lora_request)
            salt = request.adapter.salted(salt)
        if params.steering is not None:
            salt = salted(params.steering.digest, salt, "steering")
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        given, streams = self.tokenizer if params.detokenize else None, asked.streams and not params.beam_width
        specials = {} if params.stop is None else special_stops(params, self.tokenizer)
        for index in range(params.n):
            seed = 0 if params.greedy else seed_of(params, index, self._seed, number)  # half the time of a request
            seq = self._new_sequence(request, token_ids, salt, index, seed, bad_words, asked.num_question)
            # These need each token as soon as it is sampled.
            if streams or params.stop_strings or params.logprobs is not None:
                completion = WatchedCompletion(index, seq, given, special_stops=specials, streams=streams)
            else:
                completion = Completion(index, seq, given)
            request.completions.append(completion)
        if params.beam_width:
            leader = self.new_beam(request, token_ids, salt, asked.num_question)
            width, penalty, stop_ids = params.beam_width, params.length_penalty, leader.stop_ids
            request.beams = Beams(width, penalty, stop_ids, leader.max_len, leader.num_prompt, {leader: 0.0})
        else:
            leader, *leader.forks = [completion.seq for completion in request.completions]
        leader.pooling_type = asked.pooling_type
        return request

    def _new_sequence(
        self,
        request: Request,
        token_ids: np.ndarray,
        salt: str,
        index: int = 0,
        seed: int = 0,
        bad_words: BadWords = (),
        num_question: int = 0,
    ) -> Sequence:
        params, count = request.params, len(request.prompt_token_ids)
        if index == 0:
            stop_ids = self._stop_ids(params)
        else:  # lists of 100,000 ids are read once a request, not for each completion
            before = request.completions[-1].seq
            stop_ids, params = before.stop_ids, before.params
            if params.prompt_logprobs is not None:
                params = dataclasses.replace(params, prompt_logprobs=None)
        return Sequence(
            seq_id=next(self._seq_ids),
            token_ids=token_ids,
            params=params,
            stop_ids=stop_ids,
            max_len=params.max_len(count, self.scheduler.max_model_len),
            seed=seed,
            owner=request,
            request_id=request.request_id,
            index=index,
            bad_words=bad_words,
            num_question=num_question,
            adapter=request.adapter,
            matcher=None if (asked := params.structured_outputs) is None else self.grammars.matcher(asked),
            steering=request.params.steering,
            kv=KVState(salt, request.metrics.num_blocks_by_origin),
        )

    def new_beam(self, request: Request, token_ids: np.ndarray, salt: str, num_question: int) -> Sequence:
        """Creates a beam of a request, from its prompt or a continuation of it."""
        seq = self._new_sequence(request, token_ids, salt, num_question=num_question)
        count = num_candidates(request.params.beam_width, seq.stop_ids)
        seq.params = SamplingParams(temperature=0, logprobs=count, max_tokens=request.params.max_tokens)
        seq.is_beam, seq.num_prompt, seq.index = True, len(request.prompt_token_ids), seq.seq_id
        return seq
