"""POST /v1/completions: continues texts or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ksana_jax.core.outputs import CompletionOutput, RequestOutput
from ksana_jax.serve.server.chunks import Chunks, Echo, TextChoice
from ksana_jax.serve.server.errors import json_response
from ksana_jax.serve.server.generation import Usage, submit
from ksana_jax.serve.server.json_body import read_request
from ksana_jax.serve.server.logprobs import CompletionLogprobs, prompt_logprobs
from ksana_jax.serve.server.model import ServedModel
from ksana_jax.serve.server.prompts import PromptIds, check_length, check_model, completion_prompts
from ksana_jax.serve.server.replies import head_of, reply, streams_usage
from ksana_jax.serve.server.request_models import CompletionRequest
from ksana_jax.serve.server.state import cache_salt, serving_of
from ksana_jax.serve.server.token_stream import TokenStream


async def create(request: Request) -> Response:
    """Answers a request for completions; see `request_models`."""
    serving = serving_of(request)
    model, _ = serving.model, serving.llm
    asked = await read_request(request, CompletionRequest)
    check_model(model, asked.model)
    answer = _Answer(asked, model, await completion_prompts(serving, asked))
    head = head_of(model, "cmpl", "text_completion", asked)
    salt, adapter = cache_salt(request, asked.cache_salt), model.adapters.get(asked.model or "")
    given = {"request_id": head["id"], "salt": salt, "adapter": adapter}
    streams = await submit(serving, answer.prompts, answer.params, asked, **given)
    if asked.stream:
        chunks = Chunks(head, answer.choices(), answer.usage(), *streams_usage(asked))

        def write(number: int, output: RequestOutput) -> str:
            return chunks.write(number, answer.kept(output))

        return TokenStream(streams, write, chunks.last, serving.settings.ping_s)
    return await reply(request, streams, lambda outputs: json_response({**head, **answer.json(outputs)}))


class _Answer:
    """The answer to a request for completions.

    Attributes:
      params: max_tokens 0 with echo scores the prompt; the engine then samples a token, which is dropped.
    """

    def __init__(self, asked: CompletionRequest, model: ServedModel, prompts: list[PromptIds]):
        self.asked, self.model, self.prompts = asked, model, prompts
        more: dict[str, Any] = {"logprobs": asked.logprobs, "detokenize": model.tokenizer is not None}
        if asked.max_tokens is not None:
            more["max_tokens"] = asked.max_tokens or 1
        if asked.echo and asked.prompt_logprobs is None:
            more["prompt_logprobs"] = asked.logprobs
        self.params = asked.sampling_params(**more)
        check_length(model, prompts, asked.max_tokens, "prompt")

    def usage(self) -> Usage:
        """Returns the counts before anything is generated."""
        return Usage(sum(len(prompt.ids) for prompt in self.prompts))

    def kept(self, output: RequestOutput) -> RequestOutput:
        """Returns an output without the token that the engine always samples."""
        if self.asked.max_tokens == 0:
            for completion in output.outputs:
                completion.text, completion.token_ids, completion.logprobs = "", [], [] if completion.logprobs else None
        return output

    def choices(self) -> list[TextChoice]:
        """Returns a writer for each choice."""
        return [
            TextChoice(number * self.params.n + index, *self._writers(prompt), self.asked.return_token_ids)
            for number, prompt in enumerate(self.prompts)
            for index in range(self.params.n)
        ]

    def _writers(self, prompt: PromptIds) -> tuple[CompletionLogprobs | None, Echo | None]:
        """Returns the writers of log-probabilities and echo for a completion of this prompt."""
        model, skip, ids = self.model, self.params.skip_special_tokens, prompt.ids.tolist()
        logprobs = echo = text = None
        if self.asked.echo:
            text = prompt.text
            if text is None:
                text = "" if model.tokenizer is None else model.tokenizer.decode(ids, skip)
        if self.asked.logprobs is not None:
            logprobs = CompletionLogprobs(model.texts, model.tokenizer, skip, ids, len(text or ""))
        if text is not None:
            scores = None if logprobs is None else CompletionLogprobs(model.texts, model.tokenizer, skip)
            echo = Echo(text, scores)
        return logprobs, echo

    def json(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns choices and usage of the whole outputs."""
        choices, usage = [], self.usage()
        usage.note(outputs)
        for number, output in enumerate(map(self.kept, outputs)):
            for completion in output.outputs:
                usage.completion += len(completion.token_ids)
                choices.append(self._choice(number * self.params.n + completion.index, number, completion, output))
        return {"choices": choices, "usage": usage.json()}

    def _choice(self, index: int, number: int, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        logprobs, echo = self._writers(self.prompts[number])
        text, arrays = completion.text, None
        if logprobs is not None:
            arrays = logprobs.write(completion.token_ids, completion.logprobs or ())
        if echo is not None:
            text, arrays = echo.text + text, echo.before(arrays, output)
        choice = {"index": index, "text": text, "logprobs": arrays, "finish_reason": completion.finish_reason}
        if self.asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.model.texts, output.prompt_logprobs or ())
        if self.asked.return_token_ids:
            choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": completion.token_ids}
        return choice
