"""POST /v1/chat/completions: answers conversations."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ksana_jax.core.outputs import CompletionOutput, RequestOutput
from ksana_jax.serve.server.chunks import ChatChoice, Chunks
from ksana_jax.serve.server.errors import bad_request, json_response
from ksana_jax.serve.server.fields import CHAT, read_fields
from ksana_jax.serve.server.generation import Usage, read_params, submit
from ksana_jax.serve.server.json_body import read_object
from ksana_jax.serve.server.logprobs import chat_logprobs, prompt_logprobs
from ksana_jax.serve.server.model import ServedModel
from ksana_jax.serve.server.prompts import Prompt, chat_prompt, check_length, check_model
from ksana_jax.serve.server.replies import head_of, reply, streams_usage
from ksana_jax.serve.server.state import cache_salt, serving_of
from ksana_jax.serve.server.token_stream import TokenStream


async def create(request: Request) -> Response:
    """Answers a request for chat completions; see `fields.CHAT`."""
    serving = serving_of(request)
    model, _ = serving.model, serving.llm
    values = await read_object(request, serving.settings, serving.in_thread, partial(read_fields, fields=CHAT))
    check_model(model, values["model"])
    if values["top_logprobs"] and not values["logprobs"]:
        raise bad_request(f"top_logprobs is {values['top_logprobs']}, must be 0 without logprobs", "top_logprobs")
    if values["stream"] and values["prompt_logprobs"] is not None:
        raise bad_request("prompt_logprobs does not go with stream", "prompt_logprobs")
    num_top = values["top_logprobs"] if values["logprobs"] else None
    # An answer may reach max_model_len unless it is limited.
    asked = values["max_tokens"] if values["max_completion_tokens"] is None else values["max_completion_tokens"]
    params = read_params(values, CHAT, logprobs=num_top, max_tokens=asked)
    prompt = await chat_prompt(serving, values)
    check_length(model, [prompt], asked, "messages")
    stream, salt = values["stream"], cache_salt(request, values["cache_salt"])
    kind = "chat.completion.chunk" if stream else "chat.completion"
    head, with_ids = head_of(model, "chatcmpl", kind, values), values["return_token_ids"]
    ids = {"prompt_token_ids": prompt.ids.tolist()} if with_ids else {}
    given = {"request_id": head["id"], "salt": salt, "adapter": model.adapters.get(values["model"])}
    streams = await submit(serving, [prompt], params, CHAT, streams=stream, **given)
    if stream:
        choices = [ChatChoice(index, model.texts, num_top, with_ids) for index in range(params.n)]
        chunks = Chunks(head, choices, Usage(len(prompt.ids)), *streams_usage(values), ids)
        return TokenStream(streams, chunks.write, chunks.last, serving.settings.ping_s)

    def answer(outputs: list[RequestOutput]) -> Response:
        return json_response({**head, **_answer(outputs[0], prompt, model, num_top, with_ids), **ids})

    return await reply(request, streams, answer)


def _answer(
    output: RequestOutput, prompt: Prompt, model: ServedModel, num_top: int | None, with_ids: bool
) -> dict[str, Any]:
    """Returns choices and usage of a whole output."""

    def scores(one: CompletionOutput) -> dict[str, Any] | None:
        return None if num_top is None else chat_logprobs(model.texts, one.token_ids, one.logprobs or (), num_top)

    choices = [
        {
            "index": one.index,
            "message": {"role": "assistant", "content": one.text},
            "logprobs": scores(one),
            "finish_reason": one.finish_reason,
            **({"token_ids": one.token_ids} if with_ids else {}),
        }
        for one in output.outputs
    ]
    usage = Usage(len(prompt.ids), sum(len(one.token_ids) for one in output.outputs), output.num_cached_tokens)
    answer: dict[str, Any] = {"choices": choices, "usage": usage.json()}
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(model.texts, output.prompt_logprobs)
    return answer
