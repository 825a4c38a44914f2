"""POST /v1/chat/completions: answers conversations."""

from __future__ import annotations

from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ksana_jax.core.outputs import CompletionOutput, RequestOutput
from ksana_jax.core.request import SamplingParams
from ksana_jax.engine.request_stream import RequestStream
from ksana_jax.serve.server.chat_form import ChatForm, chat_form
from ksana_jax.serve.server.chunks import ChatChoice, Chunks, reason_of
from ksana_jax.serve.server.errors import json_response
from ksana_jax.serve.server.generation import Usage, submit
from ksana_jax.serve.server.json_body import read_request
from ksana_jax.serve.server.logprobs import chat_logprobs, prompt_logprobs
from ksana_jax.serve.server.prompts import PromptIds, chat_prompt, check_length, check_model
from ksana_jax.serve.server.replies import head_of, reply, streams_usage
from ksana_jax.serve.server.request_models import ChatRequest
from ksana_jax.serve.server.state import Serving, cache_salt, serving_of
from ksana_jax.serve.server.token_stream import TokenStream


class Chat(NamedTuple):
    """A conversation whose answers are being generated."""

    serving: Serving
    head: dict[str, Any]
    prompt: PromptIds
    params: SamplingParams
    form: ChatForm
    streams: list[RequestStream]


async def begin(request: Request, asked: ChatRequest, prefix: str, kind: str) -> Chat:
    """Passes a conversation to the engine.

    Args:
      prefix: of the id. kind: the object of the answer.

    Raises:
      APIError: it cannot be served, see `chat_prompt`, `chat_form` and `submit`.
    """
    serving = serving_of(request)
    model, _ = serving.model, serving.llm
    check_model(model, asked.model)
    # An answer may reach max_model_len unless it is limited.
    max_tokens = asked.max_completion_tokens or asked.max_tokens
    params = asked.sampling_params(logprobs=asked.top_logprobs if asked.logprobs else None, max_tokens=max_tokens)
    prompt = await chat_prompt(serving, asked)
    check_length(model, [prompt], max_tokens, "messages")
    form = chat_form(model, asked, prompt, serving.settings.tool_call_parser)
    try:
        params = form.applied(params)
    except ValueError as error:
        raise asked.refused(error) from None
    head = head_of(model, prefix, kind, asked)
    salt, adapter = cache_salt(request, asked.cache_salt), model.adapters.get(asked.model or "")
    streams = await submit(serving, [prompt], params, asked, request_id=head["id"], salt=salt, adapter=adapter)
    return Chat(serving, head, prompt, params, form, streams)


async def create(request: Request) -> Response:
    """Answers a request for chat completions; see `request_models`."""
    asked = await read_request(request, ChatRequest)
    chat = await begin(request, asked, "chatcmpl", "chat.completion.chunk" if asked.stream else "chat.completion")
    num_top, with_ids, model = chat.params.logprobs, asked.return_token_ids, chat.serving.model
    ids = {"prompt_token_ids": chat.prompt.ids.tolist()} if with_ids else {}
    if asked.stream:
        choices = [
            ChatChoice(index, model.texts, num_top, with_ids, chat.form.parts()) for index in range(chat.params.n)
        ]
        chunks = Chunks(chat.head, choices, Usage(len(chat.prompt.ids)), *streams_usage(asked), ids)
        return TokenStream(chat.streams, chunks.write, chunks.last, chat.serving.settings.ping_s)

    def answer(outputs: list[RequestOutput]) -> Response:
        return json_response({**chat.head, **_answer(outputs[0], chat, with_ids), **ids})

    return await reply(request, chat.streams, answer)


def _answer(output: RequestOutput, chat: Chat, with_ids: bool) -> dict[str, Any]:
    """Returns choices and usage of a whole output."""
    texts, num_top = chat.serving.model.texts, chat.params.logprobs

    def scores(one: CompletionOutput) -> dict[str, Any] | None:
        return None if num_top is None else chat_logprobs(texts, one.token_ids, one.logprobs or (), num_top)

    messages = [chat.form.message(one.text) for one in output.outputs]
    choices = [
        {
            "index": one.index,
            "message": message,
            "logprobs": scores(one),
            "finish_reason": reason_of(one, "tool_calls" in message),
            **({"token_ids": one.token_ids} if with_ids else {}),
        }
        for one, message in zip(output.outputs, messages, strict=True)
    ]
    usage = Usage(len(chat.prompt.ids), sum(len(one.token_ids) for one in output.outputs))
    usage.note([output])
    answer: dict[str, Any] = {"choices": choices, "usage": usage.json()}
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(texts, output.prompt_logprobs)
    return answer
