"""Turns the prompts and conversations of requests into token ids, off the event loop and within limits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.serve.server.errors import APIError, bad_request
from ksana_jax.serve.server.model import ServedModel
from ksana_jax.serve.server.state import Serving
from ksana_jax.tokenizers import Tokenizer, render_chat

# Characters of a prompt for each token that the model takes: more are refused before they are tokenized.
CHARS_PER_TOKEN = 16
TOO_LONG = "context_length_exceeded"
_TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


class Prompt(NamedTuple):
    """A prompt: token ids int32 [n], and its text, if it came as one."""

    ids: np.ndarray
    text: str | None

    def last(self, count: int | None) -> Prompt:
        """Returns the last `count` tokens as a prompt; all for None."""
        return self if count is None or count >= len(self.ids) else Prompt(self.ids[len(self.ids) - count :], None)


def check_model(model: ServedModel, given: str | None) -> None:
    """Checks that a request asks for the model that is served or one of its adapters; raises APIError, status 404."""
    names = *model.names, *model.adapters
    if given is not None and given not in names:
        raise unknown_model(given, names)


def unknown_model(given: str, names: Sequence[str]) -> APIError:
    """Returns the error of a request for a model that is not served. names: of those that are."""
    message = f"model {given!r:.120} does not exist; served: {', '.join(names)}"
    return APIError(404, message, param="model", code="model_not_found")


async def completion_prompts(serving: Serving, values: dict[str, Any]) -> list[Prompt]:
    """Returns the prompts of a request for completions.

    Raises:
      APIError: status 400: a text is too long to be tokenized, or there is no tokenizer.
    """
    prompts: list[Prompt] = []
    kept = _num_kept(serving.model, values)
    for given in values["prompt"]:
        if isinstance(given, str):
            prompts.append((await text_prompt(serving, given, values["add_special_tokens"])).last(kept))
        else:
            prompts.append(Prompt(given, None).last(kept))
    return prompts


async def one_prompt(serving: Serving, values: dict[str, Any]) -> Prompt:
    """Returns the text or the conversation of a request that has one of them; raises APIError as `completion_prompts`
    and `chat_prompt`."""
    if (values["prompt"] is None) == (values["messages"] is None):
        raise bad_request("give prompt or messages, one of them", "prompt")
    if values["messages"] is None:
        return await text_prompt(serving, values["prompt"], values["add_special_tokens"] is not False)
    if values["add_special_tokens"]:
        raise bad_request("add_special_tokens is True: the chat template writes special tokens", "add_special_tokens")
    return await chat_prompt(serving, values)


async def text_prompt(serving: Serving, text: str, add_special_tokens: bool, field: str = "prompt") -> Prompt:
    """Returns a text as a prompt; raises APIError as `completion_prompts`."""
    tokenizer = _tokenizer(serving.model, field)
    _check_chars(serving.model, text, field)
    ids = await serving.in_thread(_encode, tokenizer, text, add_special_tokens, field)
    return Prompt(ids, text)


async def chat_prompt(serving: Serving, values: dict[str, Any]) -> Prompt:
    """Returns a conversation as a prompt, formatted by the chat template of the model.

    Raises:
      APIError: status 400: there is no template, it refuses the messages, or they are too long.
    """
    messages, model = values["messages"], serving.model
    tokenizer = _tokenizer(model, "messages")
    if tokenizer.chat_template is None:
        why = f", for {tokenizer.no_template}" if tokenizer.no_template else ""
        raise bad_request(
            f"model {model.name} has no chat template{why}: ask /v1/completions, or start the server with "
            "--chat-template",
            "messages",
        )
    _check_chars(model, *(message.get("content") or "" for message in messages), field="messages")
    text = await serving.in_thread(_render, tokenizer, messages, {name: values[name] for name in _TEMPLATE_FIELDS})
    _check_chars(model, text, field="messages")
    # A template writes the special tokens itself.
    prompt = Prompt(await serving.in_thread(_encode, tokenizer, text, False, "messages"), text)
    return prompt.last(_num_kept(model, values))


def _num_kept(model: ServedModel, values: dict[str, Any]) -> int | None:
    """Returns how many tokens at a prompt's end are kept, None for all; raises APIError."""
    count = values.get("truncate_prompt_tokens")
    if count == -1:
        asked = values.get("max_completion_tokens") or values["max_tokens"] or 1
        return max(model.max_model_len - asked, 1)
    if count == 0:
        raise bad_request(
            "truncate_prompt_tokens is 0, must be at least 1, or -1 for what fits", "truncate_prompt_tokens"
        )
    return count


def _tokenizer(model: ServedModel, field: str) -> Tokenizer:
    if model.tokenizer is None:
        raise bad_request(f"model {model.name} has no tokenizer: send {field} as token ids to /v1/completions", field)
    return model.tokenizer


def _check_chars(model: ServedModel, *texts: str, field: str = "prompt") -> None:
    chars, most = sum(map(len, texts)), CHARS_PER_TOKEN * model.max_model_len
    if chars > most:
        raise bad_request(
            f"{field} has {chars:,} characters, at most {most:,} are tokenized: {CHARS_PER_TOKEN} for each of the "
            f"{model.max_model_len:,} tokens of max_model_len",
            field,
            TOO_LONG,
        )


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool, field: str) -> np.ndarray:
    try:
        return np.array(tokenizer.encode(text, add_special_tokens), np.int32)
    except ValueError as error:
        raise bad_request(str(error), field) from None


def _render(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> str:
    try:
        return render_chat(tokenizer, messages, **options)
    except ValueError as error:
        field = re.split(r"[ .\[]", str(error), maxsplit=1)[0]
        raise bad_request(str(error), field if field in options else "messages") from None


def check_length(model: ServedModel, prompts: Sequence[Prompt], max_tokens: int | None, field: str) -> None:
    """Checks that prompt and output fit into a sequence.

    Args:
      max_tokens: as the client asks; None for as many as fit.

    Raises:
      APIError: status 400, with the three numbers.
    """
    for prompt in prompts:
        count, asked = len(prompt.ids), max_tokens or 0
        if count >= model.max_model_len:
            raise bad_request(
                f"{field} has {count:,} tokens, max_model_len is {model.max_model_len:,} and leaves no token of output",
                field,
                TOO_LONG,
            )
        if count + asked > model.max_model_len:
            raise bad_request(
                f"{field} has {count:,} tokens and max_tokens is {asked:,}, together {count + asked:,}, more than the "
                f"{model.max_model_len:,} of max_model_len",
                "max_tokens",
                TOO_LONG,
            )
