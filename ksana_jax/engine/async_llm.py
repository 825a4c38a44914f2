"""The public class `AsyncLLM`: requests from the tasks of an event loop, steps in a thread per engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.lora import LoRARequest
from ksana_jax.core.outputs import RequestOutput
from ksana_jax.core.request import RequestInput, SamplingParams
from ksana_jax.engine.distributed.replicas import Replica, Replicas, load_of
from ksana_jax.engine.engine import Engine
from ksana_jax.engine.engine_thread import EngineThread
from ksana_jax.engine.idle_sleep import IdleSleep, NotServing
from ksana_jax.engine.inflight import InflightRequests
from ksana_jax.engine.llm import LLM
from ksana_jax.engine.model_memory import ModelMemoryManager
from ksana_jax.engine.prompts import Prompt, read_requests
from ksana_jax.engine.request_stream import RequestStream
from ksana_jax.engine.sleeping import check
from ksana_jax.engine.tokenizer_threads import TokenizerThreads

# Seconds that `close` waits for a running step; the first one may be compiling.
_CLOSE_S = 60.0


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Load of the engines at one moment, summed over replicas.

    num_requests: accepted and not ended. num_sequences: of these requests; n completions of a prompt count n.
    num_running: sequences that hold a row. num_waiting: sequences that wait for one, also again after preemption.
    num_prefill_tokens: prompt tokens of requests that have no first token yet. blocks_in_use, num_blocks: of the pool.
    num_steps_under_way: submitted to the device. is_draining: new requests are refused.
    num_compiling: programs that are compiled meanwhile; until they are there, steps take larger ones.
    """

    num_requests: int
    num_sequences: int
    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    blocks_in_use: int
    num_blocks: int
    num_steps_under_way: int
    is_draining: bool
    num_compiling: int


class AsyncLLM:
    """Serves an event loop: each request is a stream of outputs, and all of them share the engine's steps.

    Steps run in a thread per replica; text prompts are tokenized in others. Outputs reach the event loop once per step,
    and a reader that is slower than the engine gets longer pieces. All methods are for tasks of one event loop,
    the first request's; creating an `AsyncLLM`, which loads the model, needs none and takes time. ::

        async with AsyncLLM("ksana-tiny") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=64), delta=True):
                print(output.outputs[0].text, end="")

    Args:
      model, settings: as for `LLM`.

    Attributes:
      observers: called on the event loop with the `StepNews` of each step; they may look, not change anything.
      admission: called as admission(num_sequences, num_prompt_tokens) right before new requests are queued; raises to
        refuse them. None admits all. State that it reads, such as `stats()`, cannot change until they are queued.
      tokenizer_threads: threads for tokenizing, which callers may use for similar work.
    """

    def __init__(self, model: str | Path, **settings: Any):
        llm = LLM(model, **settings)
        self._take(llm.replicas, llm, llm.close)

    @classmethod
    def around(cls, llm: LLM | Engine) -> AsyncLLM:
        """Serves with an LLM, or with an engine from `build_engine`, whatever its executor; `close` leaves it open.

        Meanwhile, other threads may call `LLM.generate` and `LLM.stream`.
        """
        self = cls.__new__(cls)
        if isinstance(llm, Engine):
            self._take(Replicas([Replica(llm)]), None, None)
        else:
            self._take(llm.replicas, llm, None)
        return self

    def _take(self, replicas: Replicas, llm: LLM | None, close: Callable[[], None] | None) -> None:
        self.replicas, self.llm, self._close_llm = replicas, llm, close
        self.engine = replicas.engines[0]
        self.tokenizer, self.config, self.model_config = self.engine.tokenizer, self.engine.config, self.engine.model
        self.max_model_len = self.engine.max_model_len
        self.admission: Callable[[int, int], None] | None = None
        self.threads = TokenizerThreads()
        self._open = InflightRequests()
        self._refuses = ""
        self._idle_sleep: IdleSleep | None = None
        self._threads = [EngineThread(replicas, index, self._open.post) for index in range(len(replicas.replicas))]
        for thread in self._threads:
            thread.start()
        # Also when it is dropped, or at the end of the process, so that no thread is left in the device's code.
        self._stop_threads = weakref.finalize(self, _stop, self.engine, self._threads)

    @property
    def observers(self) -> list:
        return self._open.observers

    # ------------------------------------------------------------------ requests

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
        delta: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Completes a prompt; yields its output whenever it has grown. Arguments and errors as for `submit`.

        The request is aborted if the reader closes the iterator, or its task is cancelled.
        """
        given = {"cache_salt": cache_salt, "delta": delta, "lora_request": lora_request}
        async with await self.submit(prompt, sampling_params, request_id, **given) as stream:
            async for output in stream:
                yield output

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
        delta: bool = False,
        streams: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> RequestStream:
        """Checks and queues a request; returns the stream of its output.

        Args:
          prompt: a text, token ids, {"prompt": text}, or {"prompt_token_ids": [...]}; see `LLM.generate`.
          sampling_params: None takes the defaults.
          request_id: for `abort` and in outputs; None assigns one.
          cache_salt: prefixes are shared only among requests with equal salts.
          delta: outputs have only the news since the last one; otherwise all of the request's output so far, which
            takes time quadratic in the length.
          streams: False reports completions only at their ends, which saves time.
          lora_request: an adapter, in an engine with `enable_lora`.

        Raises:
          ValueError: the request can never be served, or its id is in use; nothing is queued.
          NotServing: the engine is draining, closed or dead.
          RuntimeError: this is a forked child of the engine's process.
          Exception: raised by `admission`.
        """
        given = {"cache_salt": cache_salt, "delta": delta, "streams": streams, "lora_request": lora_request}
        [stream] = await self.submit_all([prompt], sampling_params, [request_id], **given)
        return stream

    async def submit_all(
        self,
        prompts: Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        request_ids: Seq[str | None] | None = None,
        *,
        cache_salt: str = "",
        delta: bool = False,
        streams: bool = True,
        lora_request: LoRARequest | None = None,
        pooling_type: str | None = None,
    ) -> list[RequestStream]:
        """Checks and queues several requests, all or none; see `submit`.

        Args:
          sampling_params: one for all prompts, or one per prompt.
          request_ids: one per prompt.
          pooling_type: see `RequestInput`.
        """
        self._bind()
        self._check_serving()
        arrival_s = self.engine.clock()
        async with self.awake():
            asked = await self._read(list(prompts), sampling_params, streams)
            if request_ids is not None:
                asked = [one._replace(request_id=name) for one, name in zip(asked, request_ids, strict=True)]
            for given in {one.params.structured_outputs for one in asked}:
                if given is not None:  # compiled where it holds up no loop
                    await self.threads.run(self.engine.factory.grammars.matcher, given)
            if lora_request is not None:
                await self.threads.run(self.engine.factory.adapter_of, lora_request)
                asked = [one._replace(lora_request=lora_request) for one in asked]
            if pooling_type is not None:
                asked = [one._replace(pooling_type=pooling_type) for one in asked]
            if cache_salt:
                asked = [one._replace(cache_salt=cache_salt) for one in asked]
            # From here to the end no other task runs: what is checked stays true until the requests are queued.
            self._check_serving()
            if self.engine.asleep is not None:
                raise NotServing("the engine sleeps: call wake_up() first")
            return self._queue(asked, arrival_s, delta)

    async def _read(self, prompts: list[Prompt], params: Any, streams: bool) -> list[RequestInput]:
        """Returns prompts as requests; tokenizes texts in another thread."""
        if any(isinstance(prompt, str) or _is_text(prompt) for prompt in prompts):
            return await self.threads.run(read_requests, prompts, params, None, self.tokenizer, streams=streams)
        return read_requests(prompts, params, None, self.tokenizer, streams=streams)

    def _queue(self, asked: list[RequestInput], arrival_s: float, delta: bool) -> list[RequestStream]:
        names = [one.request_id for one in asked if one.request_id is not None]
        for at, name in enumerate(names):
            if name in self._open.by_id or name in names[:at]:
                raise ValueError(f"request id {name!r} is in use")
        requests = self.engine.factory.new_requests(asked, clock=lambda: arrival_s, taken=self._open.by_id)
        if self.admission is not None:
            num_sequences = sum(request.params.num_sequences for request in requests)
            self.admission(num_sequences, sum(len(request.prompt_token_ids) for request in requests))
        streams = []
        for request in requests:
            replica = self.replicas.assign(request)
            found = self._open.open(request, replica)
            self._threads[replica].add(request, load_of(request))
            abort = functools.partial(self._abort, replica, request.request_id)  # keeps this object for its readers
            streams.append(RequestStream(request.request_id, request.prompt_token_ids, found.buffer, abort, delta))
        return streams

    async def abort(self, request_id: str) -> None:
        """Ends a request in any state and waits until its blocks are free; unknown and ended requests are ignored.

        Its reader gets a last output with finish_reason "abort".
        """
        self._bind()
        if (found := self._open.by_id.get(request_id)) is not None:
            self._abort(found.replica, request_id)
            await asyncio.shield(found.ended)

    def _abort(self, replica: int, request_id: str) -> None:
        self._threads[replica].abort(request_id)

    # ------------------------------------------------------------------ state

    def sleep_when_idle(
        self, after_s: float | None, level: int = 1, model_memory: ModelMemoryManager | None = None
    ) -> None:
        """Lets the LLM sleep when it is idle; the next request wakes it up. On the event loop.

        Args:
          after_s: seconds without a request after which it sleeps; None waits until others need its memory.
          level: see `LLM.sleep`.
          model_memory: the budget that it shares with others.

        Raises:
          ConfigError: it cannot sleep; the message says why.
        """
        if self.llm is None:
            raise ConfigError("an engine without an LLM cannot sleep")
        self.replicas.each(check)
        self._idle_sleep = IdleSleep(self.llm, after_s, level, lambda: bool(self._open.by_id), model_memory)
        self._idle_sleep.start()

    def awake(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Wakes the LLM up if `sleep_when_idle` has let it sleep, and keeps it awake inside `async with`.

        Raises:
          NotServing: it cannot wake up.
        """
        return contextlib.nullcontext() if self._idle_sleep is None else self._idle_sleep.awake()

    def stats(self) -> EngineStats:
        """Returns the engines' load; takes microseconds."""
        schedulers = [engine.scheduler for engine in self.replicas.engines]
        return EngineStats(
            num_requests=len(self._open.by_id),
            num_sequences=self._open.num_sequences,
            num_running=sum(len(scheduler.order) for scheduler in schedulers),
            num_waiting=sum(len(scheduler.waiting) for scheduler in schedulers),
            num_prefill_tokens=self._open.num_prefill_tokens,
            blocks_in_use=sum(scheduler.blocks.num_used for scheduler in schedulers),
            num_blocks=sum(scheduler.blocks.num_blocks for scheduler in schedulers),
            num_steps_under_way=sum(engine.num_steps_under_way for engine in self.replicas.engines),
            is_draining=self._refuses == _DRAINING,
            num_compiling=sum(engine.num_compiling for engine in self.replicas.engines),
        )

    def between_steps(self, function: Callable[[Engine], None]) -> None:
        """Calls a function with each engine, in its thread and between two of its steps; it must not raise."""
        for thread in self._threads:
            thread.call(function)

    @property
    def is_alive(self) -> bool:
        """True if the engines can compute steps: none was closed or failed three times in a row."""
        return not self._open.has_dead and all(thread.is_alive for thread in self._threads)

    @property
    def error(self) -> str | None:
        """The exception that killed an engine; None while all are alive, or if they were closed."""
        if self.is_alive or self._open.failure is None or self._refuses == _CLOSED:
            return None
        return f"{type(self._open.failure).__name__}: {self._open.failure}"

    def _bind(self) -> None:
        self._open.bind()

    def _check_serving(self) -> None:
        if self._refuses:
            raise NotServing(self._refuses)
        if not self.is_alive:
            raise NotServing(f"the engine is dead: {self.error}")

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests and waits for the end of those accepted; returns whether all have ended in time.

        Args:
          timeout_s: None waits as long as it takes. Requests that are left continue until `close`.
        """
        self._bind()
        self._refuses = self._refuses or _DRAINING
        if self._idle_sleep is not None:
            self._idle_sleep.end()
        ended = [found.ended for found in self._open.by_id.values()]
        if ended:
            await asyncio.wait(ended, timeout=timeout_s)
        return not self._open.by_id

    def close(self) -> None:
        """Aborts all requests, ends the threads, and closes the LLM if it is its own; again, it does nothing.

        Waits for steps under way: on the event loop, call `aclose`.
        """
        self._refuses = _CLOSED
        if self._idle_sleep is not None:
            self._idle_sleep.end()
        self._stop_threads()
        self.threads.close()
        close, self._close_llm = self._close_llm, None
        if close is not None:
            close()

    async def aclose(self) -> None:
        """Calls `close` in another thread; requests that have not ended end with finish_reason "abort"."""
        self._refuses = _CLOSED
        ended = [found.ended for found in self._open.by_id.values()]
        await asyncio.get_running_loop().run_in_executor(None, self.close)
        if ended:
            await asyncio.wait(ended, timeout=_CLOSE_S)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()


_DRAINING = "the engine is draining: it ends the requests that it has accepted, and takes no more"
_CLOSED = "the engine has been closed"


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, dict) and "prompt_token_ids" not in prompt


def _stop(engine: Engine, threads: list[EngineThread]) -> None:
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(_CLOSE_S)
