"""State that all requests of a server share: engine, model, and whether it takes requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request

from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.engine.engine_thread import StepNews
from ksana_jax.engine.model_memory import ModelMemoryManager
from ksana_jax.serve.server.errors import APIError, bad_request
from ksana_jax.serve.server.histogram import LoopLag
from ksana_jax.serve.server.limits import QueueLimits
from ksana_jax.serve.server.metrics import ServingMetrics
from ksana_jax.serve.server.model import ServedModel, served_model
from ksana_jax.serve.server.settings import ServerSettings

T = TypeVar("T")

# Calls that may wait for a thread, and seconds that each may take until it is answered.
MAX_CALLS = 512
THREAD_TIMEOUT_S = 30.0
# Seconds for a step while there are requests, compiling included, after which the engine counts as stalled.
STALL_S = 120.0
# Completions of one request that are served when nothing else waits, even if the queue is shorter.
MAX_SEQUENCES = 1024
RETRY_LOADING_S = 5.0
RETRY_DRAINING_S = 30.0


class Serving:
    """Engine and model of a server, once they are loaded, and its state.

    Attributes:
      draining: whether the server is ending, and refuses new requests.
      progress: what is done while the model loads, such as "compiling 3 of 12".
      metrics, limits: of the engine, once it is loaded.
      lag: of the event loop; started by the runner of the loop.
      model_memory: the budget that the model shares with others; None for none.
    """

    metrics: ServingMetrics
    limits: QueueLimits
    model_memory: ModelMemoryManager | None = None
    _stepped_s = 0.0

    def __init__(self, settings: ServerSettings):
        self.settings = settings
        self.draining = False
        self.progress = "loading"
        self.lag = LoopLag()
        self._llm: AsyncLLM | None = None
        self._model: ServedModel | None = None
        self._num_calls = 0

    def begin(self, llm: AsyncLLM) -> None:
        """Begins to serve a model that is loaded; on the event loop."""
        settings = self.settings
        self._model = served_model(llm, settings.served_model_names, settings.lora_modules)
        self.metrics = ServingMetrics(llm, self._model.name, self.lag.histogram, settings.block_sample)
        self.limits = QueueLimits(
            llm,
            max_num_queued_reqs=settings.max_num_queued_reqs,
            max_num_queued_tokens=settings.max_num_queued_tokens,
        )
        if settings.sleep_after is not None or self.model_memory is not None:
            llm.sleep_when_idle(settings.sleep_after, settings.sleep_level, self.model_memory)
        self._stepped_s = time.monotonic()
        llm.observers.append(self._observe)
        self._llm = llm

    def _observe(self, news: StepNews) -> None:
        self._stepped_s = time.monotonic()

    @property
    def models(self) -> list[Serving]:
        """Each model of the server with its state: this one, see `several.Several` for others."""
        return [self]

    @property
    def llm(self) -> AsyncLLM:
        """The engine.

        Raises:
          APIError: status 503 while it is not loaded, or draining; 500 once it has failed.
        """
        if self.draining:
            raise APIError(503, "the server is shutting down", code="draining", retry_after_s=RETRY_DRAINING_S)
        llm = self.any_llm
        if not llm.is_alive:
            raise APIError(500, "the engine has failed and serves no more requests", code="engine_dead")
        return llm

    @property
    def any_llm(self) -> AsyncLLM:
        """The engine, draining or dead as it may be.

        Raises:
          APIError: status 503 while it is not loaded.
        """
        if self._llm is None:
            raise APIError(503, "the model is loading", code="loading", retry_after_s=RETRY_LOADING_S)
        return self._llm

    @property
    def model(self) -> ServedModel:
        """The model; raises APIError, status 503, while it is not loaded."""
        if self._model is None:
            raise APIError(503, "the model is loading", code="loading", retry_after_s=RETRY_LOADING_S)
        return self._model

    @property
    def status(self) -> str:
        """One of loading, ready, draining, stalled and dead."""
        if self._llm is None:
            return "draining" if self.draining else "loading"
        if not self._llm.is_alive:
            return "dead"
        if self._llm.stats().num_requests and time.monotonic() - self._stepped_s > STALL_S:
            return "stalled"
        return "draining" if self.draining else "ready"

    def expect(self, num_sequences: int) -> None:
        """Prepares for a request that is about to be submitted.

        Raises:
          APIError: status 400: it has more completions than any queue holds.
        """
        most = max(self.limits.max_num_queued_reqs, MAX_SEQUENCES)
        if num_sequences > most:
            message = f"the request has {num_sequences:,} completions, prompts x n, at most {most:,} are served"
            raise bad_request(message, "n")
        if not self.any_llm.stats().num_requests:
            self._stepped_s = time.monotonic()  # an idle engine does not step

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Calls a slow function in another thread, so that streams continue.

        Raises:
          APIError: status 503: too many calls wait, or this one took too long.
        """
        if self._num_calls >= MAX_CALLS:
            raise APIError(503, f"{MAX_CALLS} requests wait to be tokenized", code="overloaded", retry_after_s=1)
        self._num_calls += 1
        try:
            async with asyncio.timeout(THREAD_TIMEOUT_S):
                return await self.any_llm.threads.run(function, *args)
        except TimeoutError:
            raise APIError(503, f"tokenizing took more than {THREAD_TIMEOUT_S:g} seconds", retry_after_s=1) from None
        finally:
            self._num_calls -= 1


def serving_of(request: Request) -> Serving:
    """Returns the state of the server that a request came to."""
    return request.app.state.serving


def cache_salt(request: Request, given: str | None) -> str:
    """Returns the cache salt of a request: its API key's, divided further by the client's own."""
    of_key = request.scope.get("ksana.salt", "")
    return of_key if given is None else f"{of_key}/{given}"
