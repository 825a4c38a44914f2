"""Reads the prompts and sampling parameters of a call, in all forms that users may give. Knows no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ksana_jax.core.lora import of_prompts
from ksana_jax.core.request import RequestInput, SamplingParams
from ksana_jax.tokenizers import Tokenizer

# A text, its token ids, or {"prompt": text, "prompt_token_ids": ids, "question": text, "question_token_ids": ids,
# "cache_salt": text}; a question is read after `kv_eviction` has compressed the prompt.
Prompt: TypeAlias = str | Sequence[int] | np.ndarray | Mapping[str, Any]

_FORMS = "a text, a list of token ids, a dict, or a list of those"


def read_requests(
    prompts: Any,
    sampling_params: Any,
    prompt_token_ids: Any,
    tokenizer: Tokenizer | None,
    lora_request: Any = None,
    *,
    streams: bool,
) -> list[RequestInput]:
    """Returns the requests of a call of `LLM.generate` or `LLM.stream`, given its arguments.

    Args:
      streams: whether the caller wants text as it is generated.
      lora_request: one for all prompts, or a list with one or None for each.

    Raises:
      ValueError: an argument has the wrong type or length.
    """
    if prompts is None and prompt_token_ids is None:
        raise ValueError(f"prompts is None, must be {_FORMS}")
    if prompt_token_ids is not None:
        if prompts is not None:
            raise ValueError("prompts and prompt_token_ids were given: a prompt that has both is a dict")
        prompts = prompt_token_ids
        if not _is_ids(prompts) and not isinstance(prompts, (list, tuple)):
            raise ValueError(f"prompt_token_ids is of type {type(prompts).__name__}, must be lists of integers")
    if isinstance(prompts, (str, Mapping)) or _is_ids(prompts):
        prompts = [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise ValueError(f"prompts is of type {type(prompts).__name__}, must be {_FORMS}")
    read = [_read_prompt(prompt, tokenizer) for prompt in prompts]
    params = _read_params(sampling_params, len(read))
    if lora_request is not None:
        each = zip(read, of_prompts(lora_request, len(read)), strict=True)
        read = [one._replace(lora_request=adapter) for one, adapter in each]
    return [one._replace(params=given, streams=streams) for one, given in zip(read, params, strict=True)]


def _is_ids(prompts: Any) -> bool:
    """True if `prompts` is the token ids of a single prompt: a flat list of integers."""
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    return isinstance(prompts, (list, tuple)) and bool(prompts) and isinstance(prompts[0], (int, np.integer))


def _read_params(given: Any, count: int) -> list[SamplingParams]:
    params = SamplingParams() if given is None else given
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, (list, tuple)):
        kind = type(params).__name__
        raise ValueError(f"sampling_params is of type {kind}, must be a SamplingParams or a list of them")
    for entry in params:
        if not isinstance(entry, SamplingParams):
            raise ValueError(f"sampling_params has a {type(entry).__name__}, each must be a SamplingParams")
    if len(params) != count:
        raise ValueError(f"{count} prompts and {len(params)} sampling_params were given")
    return list(params)


_KEYS = ("prompt", "prompt_token_ids", "question", "question_token_ids", "cache_salt")


def _read_prompt(prompt: Any, tokenizer: Tokenizer | None) -> RequestInput:
    """Returns the request of one prompt, with default parameters.

    Raises:
      ValueError: it is not a prompt, or it has neither ids nor a text that can be encoded.
    """
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    elif isinstance(prompt, (list, tuple, np.ndarray)):
        prompt = {"prompt_token_ids": prompt}
    elif not isinstance(prompt, Mapping):
        raise ValueError(f"a prompt is a text, a list of token ids or a dict, not {type(prompt).__name__}")
    if unknown := sorted(map(str, set(prompt) - {*_KEYS})):
        raise ValueError(f"a prompt has unknown keys {', '.join(unknown)}; it takes {', '.join(_KEYS)}")
    salt = prompt.get("cache_salt") or ""
    if not isinstance(salt, str) or "\0" in salt:  # which divides it from an adapter's or steering's
        raise ValueError(f"cache_salt is {salt!r:.80}, must be a string without NUL")
    ids, text = _read_part("prompt", prompt, tokenizer)
    if not {"question", "question_token_ids"} & {*prompt}:
        return RequestInput(ids, SamplingParams(), text, salt)
    question, asked = _read_part("question", prompt, tokenizer)
    if not len(question):
        raise ValueError("question is empty: at least one token is needed")
    text = None if text is None or asked is None else text + asked
    return RequestInput(np.concatenate([ids, question]), SamplingParams(), text, salt, num_question=len(question))


def _read_part(name: str, prompt: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[np.ndarray, str | None]:
    """Returns token ids and text of the prompt or the question; BOS comes only before the prompt."""
    text = prompt.get(name)
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name} is a {type(text).__name__}, must be a string")
    if f"{name}_token_ids" in prompt:
        return _token_ids(f"{name}_token_ids", prompt[f"{name}_token_ids"]), text
    if text is None or tokenizer is None:
        missing = "text" if tokenizer else f"tokenizer: give {name}_token_ids"
        raise ValueError(f"{name} has no {missing}")
    return np.array(tokenizer.encode(text, add_special_tokens=name == "prompt"), np.int32), text


def _token_ids(name: str, given: Any) -> np.ndarray:
    try:
        ids = np.asarray(given)
    except ValueError:  # lists of different lengths
        raise ValueError(f"{name} must be a list of integers, not lists of different lengths") from None
    if ids.shape == (0,):
        return np.zeros(0, np.int32)
    truths = isinstance(given, (list, tuple)) and bool in map(type, given)  # NumPy would convert them to 0 and 1
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or truths:
        raise ValueError(f"{name} must be a list of integers, not {ids.dtype} of shape {ids.shape}")
    return ids
