"""Turns the prompts and conversations of requests into token ids, off the event loop and within limits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.serve.server.errors import APIError, bad_request
from ksana_jax.serve.server.message_models import Message
from ksana_jax.serve.server.model import ServedModel
from ksana_jax.serve.server.request_models import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Generation,
    OnePrompt,
    Template,
)
from ksana_jax.serve.server.state import Serving
from ksana_jax.tokenizers import Tokenizer, render_chat

# Characters of a prompt for each token that the model takes: more are refused before they are tokenized.
CHARS_PER_TOKEN = 16
TOO_LONG = "context_length_exceeded"


class PromptIds(NamedTuple):
    """A prompt: token ids int32 [n], and its text, if it came as one."""

    ids: np.ndarray
    text: str | None

    def last(self, count: int | None) -> PromptIds:
        """Returns the last `count` tokens as a prompt; all for None."""
        return self if count is None or count >= len(self.ids) else PromptIds(self.ids[len(self.ids) - count :], None)


def check_model(model: ServedModel, given: str | None) -> None:
    """Checks that a request asks for the model that is served or one of its adapters; raises APIError, status 404."""
    names = *model.names, *model.adapters
    if given is not None and given not in names:
        raise unknown_model(given, names)


def unknown_model(given: str, names: Sequence[str]) -> APIError:
    """Returns the error of a request for a model that is not served. names: of those that are."""
    message = f"model {given!r:.120} does not exist; served: {', '.join(names)}"
    return APIError(404, message, param="model", code="model_not_found")


async def completion_prompts(serving: Serving, asked: CompletionRequest | EmbeddingRequest) -> list[PromptIds]:
    """Returns the prompts of a request for completions or embeddings.

    Raises:
      APIError: status 400: a text is too long to be tokenized, or there is no tokenizer.
    """
    prompts: list[PromptIds] = []
    for given in asked.prompts():
        if isinstance(given, str):
            prompt = await text_prompt(serving, given, asked.add_special_tokens, asked.prompt_field)
        else:
            prompt = PromptIds(given, None)
        prompts.append(prompt.last(_num_kept(serving.model, asked, asked.max_tokens)))
    return prompts


async def one_prompt(serving: Serving, asked: OnePrompt) -> PromptIds:
    """Returns a text or a conversation as a prompt; raises APIError as `completion_prompts` and `chat_prompt`."""
    if asked.prompt is not None:
        return await text_prompt(serving, asked.prompt, asked.add_special_tokens is not False)
    return await chat_prompt(serving, asked)


async def text_prompt(serving: Serving, text: str, add_special_tokens: bool, field: str = "prompt") -> PromptIds:
    """Returns a text as a prompt; raises APIError as `completion_prompts`."""
    tokenizer = _tokenizer(serving.model, field)
    _check_chars(serving.model, len(text), field)
    ids = await serving.in_thread(_encode, tokenizer, text, add_special_tokens, field)
    return PromptIds(ids, text)


async def chat_prompt(serving: Serving, asked: ChatRequest | OnePrompt) -> PromptIds:
    """Returns a conversation as a prompt, formatted by the chat template of the model.

    Raises:
      APIError: status 400: there is no template, it refuses the messages, or they are too long.
    """
    messages, model = asked.messages or [], serving.model
    tokenizer = _tokenizer(model, "messages")
    if tokenizer.chat_template is None:
        why = f", for {tokenizer.no_template}" if tokenizer.no_template else ""
        raise bad_request(
            f"model {model.name} has no chat template{why}: ask /v1/completions, or start the server with "
            "--chat-template",
            "messages",
        )
    _check_chars(model, sum(len(message.content or "") for message in messages), "messages")
    options = {name: getattr(asked, name) for name in Template.model_fields}
    options["tools"] = None if asked.tools is None else [tool.plain() for tool in asked.tools]
    text = await serving.in_thread(_render, tokenizer, messages, options)
    _check_chars(model, len(text), "messages")
    # A template writes the special tokens itself.
    prompt = PromptIds(await serving.in_thread(_encode, tokenizer, text, False, "messages"), text)
    if isinstance(asked, OnePrompt):
        return prompt
    return prompt.last(_num_kept(model, asked, asked.max_completion_tokens or asked.max_tokens))


def _num_kept(model: ServedModel, asked: Generation | EmbeddingRequest, max_tokens: int | None) -> int | None:
    """Returns how many tokens at a prompt's end are kept, None for all."""
    count = asked.truncate_prompt_tokens
    return max(model.max_model_len - (max_tokens or 1), 1) if count == -1 else count


def _tokenizer(model: ServedModel, field: str) -> Tokenizer:
    if model.tokenizer is None:
        raise bad_request(f"model {model.name} has no tokenizer: send {field} as token ids to /v1/completions", field)
    return model.tokenizer


def _check_chars(model: ServedModel, chars: int, field: str) -> None:
    most = CHARS_PER_TOKEN * model.max_model_len
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


def _render(tokenizer: Tokenizer, messages: Sequence[Message], options: dict[str, Any]) -> str:
    try:
        return render_chat(tokenizer, [message.plain() for message in messages], **options)
    except ValueError as error:
        field = re.split(r"[ .\[]", str(error), maxsplit=1)[0]
        raise bad_request(str(error), field if field in options else "messages") from None


def check_length(model: ServedModel, prompts: Sequence[PromptIds], max_tokens: int | None, field: str) -> None:
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
