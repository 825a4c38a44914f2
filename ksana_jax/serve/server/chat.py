"""POST /v1/chat/completions: answers conversations."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ksana_jax.core.outputs import CompletionOutput, RequestOutput
from ksana_jax.serve.server.chat_form import ChatForm, chat_form
from ksana_jax.serve.server.chunks import ChatChoice, Chunks, reason_of
from ksana_jax.serve.server.errors import json_response
from ksana_jax.serve.server.generation import Usage, submit
from ksana_jax.serve.server.json_body import read_request
from ksana_jax.serve.server.logprobs import chat_logprobs, prompt_logprobs
from ksana_jax.serve.server.model import ServedModel
from ksana_jax.serve.server.prompts import PromptIds, chat_prompt, check_length, check_model
from ksana_jax.serve.server.replies import head_of, reply, streams_usage
from ksana_jax.serve.server.request_models import ChatRequest
from ksana_jax.serve.server.state import cache_salt, serving_of
from ksana_jax.serve.server.token_stream import TokenStream


async def create(request: Request) -> Response:
    """Answers a request for chat completions; see `request_models`."""
    serving = serving_of(request)
    model, _ = serving.model, serving.llm
    asked = await read_request(request, ChatRequest)
    check_model(model, asked.model)
    num_top = asked.top_logprobs if asked.logprobs else None
    # An answer may reach max_model_len unless it is limited.
    max_tokens = asked.max_completion_tokens or asked.max_tokens
    params = asked.sampling_params(logprobs=num_top, max_tokens=max_tokens)
    prompt = await chat_prompt(serving, asked)
    check_length(model, [prompt], max_tokens, "messages")
    form = chat_form(model, asked, prompt, serving.settings.tool_call_parser)
    try:
        params = form.applied(params)
    except ValueError as error:
        raise asked.refused(error) from None
    kind = "chat.completion.chunk" if asked.stream else "chat.completion"
    head, with_ids = head_of(model, "chatcmpl", kind, asked), asked.return_token_ids
    ids = {"prompt_token_ids": prompt.ids.tolist()} if with_ids else {}
    salt, adapter = cache_salt(request, asked.cache_salt), model.adapters.get(asked.model or "")
    streams = await submit(serving, [prompt], params, asked, request_id=head["id"], salt=salt, adapter=adapter)
    if asked.stream:
        choices = [ChatChoice(index, model.texts, num_top, with_ids, form.parts()) for index in range(params.n)]
        chunks = Chunks(head, choices, Usage(len(prompt.ids)), *streams_usage(asked), ids)
        return TokenStream(streams, chunks.write, chunks.last, serving.settings.ping_s)

    def answer(outputs: list[RequestOutput]) -> Response:
        return json_response({**head, **_answer(outputs[0], prompt, model, num_top, with_ids, form), **ids})

    return await reply(request, streams, answer)


def _answer(
    output: RequestOutput, prompt: PromptIds, model: ServedModel, num_top: int | None, with_ids: bool, form: ChatForm
) -> dict[str, Any]:
    """Returns choices and usage of a whole output."""

    def scores(one: CompletionOutput) -> dict[str, Any] | None:
        return None if num_top is None else chat_logprobs(model.texts, one.token_ids, one.logprobs or (), num_top)

    messages = [form.message(one.text) for one in output.outputs]
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
    usage = Usage(len(prompt.ids), sum(len(one.token_ids) for one in output.outputs), output.num_cached_tokens)
    answer: dict[str, Any] = {"choices": choices, "usage": usage.json()}
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(model.texts, output.prompt_logprobs)
    return answer
