"""Requests, as users see them. Knows no scheduling, no arrays."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ksana_jax.core import checks, refusals, vllm_names
from ksana_jax.core.structured_outputs import StructuredOutputsParams, read

if TYPE_CHECKING:
    import numpy as np

    from ksana_jax.core.lora import LoRARequest

T = TypeVar("T")

MAX_N = 128
MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = MAX_LOGPROBS // 2  # each step needs twice as many candidates as beams
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIASES = 1024
MAX_STOP_IDS = 1024
MIN_REPETITION_PENALTY = 1e-6
MAX_BAD_WORDS = 256


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"
    ERROR = "error"  # see CompletionOutput.error


def _check_ids(name: str, ids: Collection[Any]) -> None:
    if checks.are_integers(ids, 0, 2**31 - 1):
        return
    checks.require(*(checks.integer(name, token, 0, 2**31 - 1) for token in ids))


def _naming_the_nearest(kind: type[T]) -> type[T]:
    """Makes a dataclass refuse an unknown keyword with the name of the nearest field."""
    init = kind.__init__
    fields = {f.name for f in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]

    @functools.wraps(init)
    def __init__(self, *args, **given):
        if not given.keys() <= fields:
            vllm_names.refuse_unknown(kind.__name__, given, fields)
        init(self, *args, **given)

    kind.__init__ = __init__
    return kind


_BOOLEANS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")


@_naming_the_nearest
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request; names and meanings as in vLLM, see docs/use/coming-from-vllm.md.

    Args:
      n: completions per prompt; with beam_width, the number of best beams returned.
      beam_width: 0 samples; otherwise the number of beams of a beam search, which excludes other sampling settings.
      length_penalty: beams are ranked by the sum of their log-probabilities / (tokens ** length_penalty).
      temperature: 0 takes the most probable token.
      top_k: most probable tokens kept; 0 or -1 keeps all.
      top_p: smallest set of tokens whose probability reaches this is kept, in (0, 1].
      min_p: tokens below min_p x the largest probability are dropped.
      repetition_penalty: divides positive (multiplies negative) logits of tokens in the prompt or the output.
      presence_penalty: subtracted once from the logits of tokens in the output.
      frequency_penalty: subtracted from the logits for each time a token is in the output.
      logit_bias: {token id: added to its logit}, -100 to 100.
      seed: gives the same tokens in any batch; None derives one from the engine's seed.
      stop: a string or strings that end the output and are not part of it; a special token alone is found even where
        the text leaves it out.
      stop_token_ids: ids that end the output, at most 1,024 different ones.
      include_stop_str_in_output: whether the text has the stop string, or the text of the id, that ended it.
      ignore_eos: continue after an end-of-sequence id.
      min_tokens: minimum number of tokens before an end-of-sequence or stop id.
      max_tokens: maximum number of output tokens; None continues to max_model_len.
      bad_words: strings whose tokens, as tokenized at the start of a text or after a space, are never completed; other
        tokenizations of a string are not caught.
      allowed_token_ids: the only ids that may be chosen; None allows all.
      forced_token_ids: the output, decoded token by token as if it had been sampled. It ends after the last one with
        finish reason "length", or after max_tokens; ids that end other outputs do not end it.
      steering: a `ksana_jax.Steering` of the network for this request; None for none.
      logprobs: number of top tokens whose log-probabilities are returned besides the chosen token's; -1 returns those
        of the whole vocabulary, as `CompletionOutput.distributions`; None for none.
      prompt_logprobs: number of top tokens whose log-probabilities are returned for each prompt token; None for none.
      detokenize: whether to produce text.
      skip_special_tokens: omit special tokens from the text.
      structured_outputs: what the text must follow, or a dict of its fields.

    Log-probabilities are the model's, before penalties, temperature and truncation; with structured_outputs, over the
    tokens that it allows.

    Raises:
      ValueError: a field is out of range; the message gives the range.
    """

    n: int = 1
    beam_width: int = 0
    length_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    bad_words: list[str] | tuple[str, ...] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    forced_token_ids: list[int] | tuple[int, ...] | None = None
    steering: Any = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self):
        largest = 2**31 - 1
        checks.require(
            checks.integer("n", self.n, 1, MAX_N),
            checks.number("temperature", self.temperature, 0, 100),
            checks.integer("top_k", self.top_k, -1, largest),
            checks.number("top_p", self.top_p, 0, 1) or checks.number("top_p", self.top_p, above=0, high=1),
            checks.number("min_p", self.min_p, 0, 1),
            # Scores divided by less may be infinite in float32.
            checks.number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100),
            checks.number("presence_penalty", self.presence_penalty, -2, 2),
            checks.number("frequency_penalty", self.frequency_penalty, -2, 2),
            checks.integer("seed", self.seed, -(2**63), 2**63 - 1, optional=True),
            checks.integer("min_tokens", self.min_tokens, 0, largest),
            checks.integer("max_tokens", self.max_tokens, 1, largest, optional=True),
            checks.integer("logprobs", self.logprobs, -1, MAX_LOGPROBS, optional=True),
            checks.integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True),
            checks.integer("beam_width", self.beam_width, 0, MAX_BEAM_WIDTH),
            checks.number("length_penalty", self.length_penalty, -10, 10),
            *(checks.boolean(name, getattr(self, name)) for name in _BOOLEANS),
        )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}")
        self._check_stops()
        self._check_bias()
        self._check_words()
        self._check_combination()

    def _check_combination(self):
        if self.beam_width and self.n > self.beam_width:
            raise ValueError(f"n is {self.n}, more than the {self.beam_width} beams of beam_width")
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", read(self.structured_outputs))
        if self.beam_width or self.forced_token_ids is not None or self.structured_outputs is not None:
            refusals.check(refusals.of_request(self), ValueError)

    def _check_stops(self):
        if not isinstance(self.stop, (str, list, tuple, type(None))):
            raise ValueError(f"stop is {self.stop!r:.60}, must be a string or a list of strings")
        if not isinstance(self.stop_token_ids, (list, tuple, type(None))):
            raise ValueError(f"stop_token_ids is {self.stop_token_ids!r:.60}, must be a list of integers")
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise ValueError(f"stop has {len(stops)} strings, at most {MAX_STOP_STRINGS} are supported")
        for text in stops:
            if not isinstance(text, str) or not 1 <= len(text) <= 256:
                raise ValueError(f"stop has {text!r:.60}, each must be a string of 1 to 256 characters")
        if stops and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")
        ids = self.stop_token_ids or ()
        _check_ids("stop_token_ids", ids)
        if (count := len(set(ids))) > MAX_STOP_IDS:  # every step compares its tokens with each
            raise ValueError(f"stop_token_ids has {count:,} different ids, at most {MAX_STOP_IDS:,} are supported")

    def _check_bias(self):
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, dict) or len(bias) > MAX_LOGIT_BIASES:
            raise ValueError(f"logit_bias must be a dict of at most {MAX_LOGIT_BIASES} entries")
        _check_ids("logit_bias key", bias)
        checks.require(*(checks.number(f"logit_bias[{token}]", value, -100, 100) for token, value in bias.items()))

    def _check_words(self):
        words = self.bad_words
        if not isinstance(words, (list, tuple, type(None))) or len(words or ()) > MAX_BAD_WORDS:
            raise ValueError(f"bad_words is {words!r:.60}, must be a list of at most {MAX_BAD_WORDS} strings")
        for word in words or ():
            if not isinstance(word, str) or not word.strip():
                raise ValueError(f"bad_words has {word!r:.60}, each must be a string that is not blank")
        for name in ("allowed_token_ids", "forced_token_ids"):
            if (ids := getattr(self, name)) is None:
                continue
            if not isinstance(ids, (list, tuple)) or not ids:
                raise ValueError(f"{name} is {ids!r:.60}, must be a list of at least one integer, or None")
            _check_ids(name, ids)

    def max_len(self, num_prompt: int, max_model_len: int) -> int:
        """Number of tokens at which a sequence ends, prompt included."""
        most = min(self.max_tokens or max_model_len, len(self.forced_token_ids or range(max_model_len)))
        return min(num_prompt + most, max_model_len)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that the request runs at once."""
        return max(self.n, self.beam_width)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """True if penalties or biases change the scores."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties or bool(self.logit_bias or self.bad_words) or self.allowed_token_ids is not None


class RequestInput(NamedTuple):
    """One prompt and the parameters for completing it.

    Args:
      prompt_token_ids: integers [n], the question included.
      prompt: its text, if any.
      cache_salt: prefixes are shared only among requests with equal salts.
      request_id: None assigns a number.
      streams: whether its text is needed as it grows; beams have none before the end.
      num_question: last tokens of the prompt, which are read after `kv_eviction` has compressed the others.
      lora_request: the adapter that it is computed with; None takes the model alone.
      pooling_type: of hidden states that the output has too, see `PoolingParams`; None for none.
    """

    prompt_token_ids: np.ndarray
    params: SamplingParams
    prompt: str | None = None
    cache_salt: str = ""
    request_id: str | None = None
    streams: bool = False
    num_question: int = 0
    lora_request: LoRARequest | None = None
    pooling_type: str | None = None
