"""Passes requests to the engine and gathers its outputs. Knows prompts and outputs, not their JSON."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ksana_jax.core.errors import ContextLengthError
from ksana_jax.core.lora import LoRARequest
from ksana_jax.core.outputs import CompletionOutput, RequestOutput
from ksana_jax.core.request import FinishReason, SamplingParams
from ksana_jax.engine.async_llm import NotServing
from ksana_jax.engine.request_stream import RequestStream
from ksana_jax.serve.server.errors import APIError, bad_request
from ksana_jax.serve.server.limits import QueueFull
from ksana_jax.serve.server.prompts import TOO_LONG, PromptIds
from ksana_jax.serve.server.request_models import EmbeddingRequest, Generation
from ksana_jax.serve.server.state import RETRY_DRAINING_S, Serving

logger = logging.getLogger("ksana_jax")


@dataclasses.dataclass
class Usage:
    """Counts of tokens: of prompts, of completions, and of prompts those taken from the prefix cache.

    reach: of models with recurrent layers, "cached_key_tokens" and "cached_state_tokens", see `RequestMetrics`.
    """

    prompt: int
    completion: int = 0
    cached: int = 0
    reach: dict[str, int] = dataclasses.field(default_factory=dict)

    def note(self, outputs: Iterable[RequestOutput]) -> None:
        """Sets the numbers of cached tokens, given the outputs of all prompts."""
        self.cached, self.reach = 0, {}
        for output in outputs:
            self.cached += output.num_cached_tokens
            keys, states = output.metrics.num_cached_keys, output.metrics.num_cached_states
            for name, count in (("cached_key_tokens", keys), ("cached_state_tokens", states)):
                if count is not None:
                    self.reach[name] = self.reach.get(name, 0) + count

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, **self.reach},
        }


async def submit(
    serving: Serving,
    prompts: Sequence[PromptIds],
    params: SamplingParams,
    asked: Generation | EmbeddingRequest,
    *,
    request_id: str,
    salt: str,
    adapter: LoRARequest | None = None,
    pooling_type: str | None = None,
) -> list[RequestStream]:
    """Passes prompts to the engine, all or none; returns the streams of their outputs, as deltas.

    Args:
      adapter: that the prompts are completed with; None for the model alone. pooling_type: see `RequestInput`.

    Raises:
      APIError: 400: one can never be served; 429: the queue is full; 503: the engine takes none.
    """
    serving.expect(len(prompts) * params.n)
    # A client may give one id to several requests that run at once.
    ids = [f"{request_id}-{number}-{secrets.token_hex(4)}" for number in range(len(prompts))]
    inputs = [{"prompt": prompt.text, "prompt_token_ids": prompt.ids} for prompt in prompts]
    given = {"cache_salt": salt, "delta": True, "streams": asked.stream, "lora_request": adapter}
    given["pooling_type"] = pooling_type
    try:
        return await serving.llm.submit_all(inputs, params, ids, **given)
    except ContextLengthError as error:
        raise bad_request(str(error), asked.prompt_field, TOO_LONG) from None
    except ValueError as error:
        raise asked.refused(error) from None
    except QueueFull as error:
        serving.metrics.refused("queue_full")
        raise APIError(429, str(error), code="queue_full", retry_after_s=error.retry_after_s) from None


@contextlib.contextmanager
def closing(streams: Sequence[RequestStream]) -> Iterator[None]:
    """Ends streams at the end of the block: requests that are unfinished are aborted."""
    try:
        yield
    finally:
        for stream in streams:
            stream.close()


async def results(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """Waits for the ends of requests; returns their whole outputs.

    Raises:
      APIError: a completion was ended by a failure.
    """
    outputs = await asyncio.gather(*(stream.result() for stream in streams))
    for output in outputs:
        for completion in output.outputs:
            check_output(completion)
    return outputs


def check_output(output: CompletionOutput) -> None:
    """Checks that a completion was not ended by a failure.

    Raises:
      APIError: status 500 or 503.
    """
    if output.finish_reason is FinishReason.ERROR:
        raise APIError(500, f"the request failed: {output.error or 'unknown error'}")
    if output.finish_reason is FinishReason.ABORT:
        raise APIError(503, "the request was aborted: the server is shutting down", code="aborted")


def as_api_error(error: Exception) -> APIError:
    """Returns the client's message about a failure while it was served."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, NotServing):
        return APIError(503, str(error), retry_after_s=RETRY_DRAINING_S)
    logger.error("a request failed", exc_info=error)
    return APIError(500, f"the request failed: {type(error).__name__}")
