"""Runs a real engine to measure its steps' costs, and the times of requests that a simulation predicts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ksana_jax.core.request import RequestInput, SamplingParams
from ksana_jax.core.sources import model_path
from ksana_jax.engine.completion import Request
from ksana_jax.engine.engine import Engine
from ksana_jax.lab.simulator.clock import VirtualClock
from ksana_jax.lab.simulator.one_engine import Served
from ksana_jax.lab.simulator.run import Arrivals
from ksana_jax.loading.tensor_files import has_weights
from ksana_jax.serve.workload.items import WorkItem
from ksana_jax.serve.workload.tokens import FIRST_TOKEN


def exercise(engine: Engine, seconds: float, *, max_prompt: int, max_output: int, seed: int = 0) -> None:
    """Runs an engine through steps of many sizes, for at least some seconds: groups of 1, 2, 4, ... requests.

    Groups alternate: in one, requests come at once; in the next, a few times as many come at random, so that about as
    many run as in the group before, most with short answers.

    Args:
      max_prompt, max_output: maximum tokens.
    """
    rng, until = np.random.default_rng(seed), engine.clock() + seconds
    sizes = _powers(engine.scheduler.max_num_seqs)
    order: list[tuple[int, bool]] = []
    while engine.clock() < until:
        if not order:
            order = [(size, together) for size in sizes for together in (True, False)]
            rng.shuffle(order)
        size, together = order.pop()
        gap = 0 if together else _mean_length(max_output) / size
        left = np.cumsum(rng.poisson(gap, size if together else 4 * size)).tolist()
        for number in itertools.count():
            while left and left[0] <= number:
                left.pop(0)
                prompt = rng.integers(FIRST_TOKEN, engine.model.vocab_size, _length(rng, max_prompt), np.int32)
                engine.add_request(prompt, exactly(_length(rng, max_output)))
            if not engine.has_work and not left:
                break
            if engine.has_work:
                engine.step()


def _mean_length(most: int) -> float:
    return (most / math.log(most + 1) + (most + 1) / 2) / 2


def _length(rng: np.random.Generator, most: int) -> int:
    """Draws a length: short ones are as frequent as in typical traffic, and long ones are not rare."""
    return _drawn(rng, most) if rng.random() < 0.5 else int(rng.integers(1, most + 1))


def _powers(most: int) -> list[int]:
    return [*(2**i for i in range(most.bit_length()) if 2**i < most), most]


def _drawn(rng: np.random.Generator, most: int) -> int:
    return int(math.exp(rng.uniform(0, math.log(most + 1))))


def exactly(num_output: int) -> SamplingParams:
    """Returns the parameters of a request whose answer has a given length: real models do not end answers on demand."""
    return SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)


def with_known_lengths(items: Sequence[WorkItem]) -> list[WorkItem]:
    """Returns requests whose max_tokens is their answer's length, as `serve` sends them to a real engine."""
    return [dataclasses.replace(item, max_tokens=item.num_output) for item in items]


def serve(engine: Engine, items: Sequence[WorkItem]) -> list[Served]:
    """Serves requests on a real engine in real time.

    They come at the times of their arrival; turns of a session when the one before has ended and its user has thought.

    Answers have the true lengths: the client sets max_tokens to it, and ignore_eos. Between requests the processor
    spins: after a sleep it takes 1.2 to 1.4 times as long for steps of the same shape, measured on two cores.

    Returns:
      Times of each request, in the order of the workload, in seconds since it began.
    """
    events = VirtualClock()
    served: dict[str, tuple[Served, Request]] = {}
    prompts = {item.index: np.asarray(item.tokens(), np.int32) for item in items}

    def send(item: WorkItem) -> None:
        [request] = engine.new_requests([RequestInput(prompts[item.index], exactly(item.num_output))])
        request.metrics.arrival_s = began + events()
        engine.add([request])
        served[request.request_id] = Served(item, events()), request

    arrivals = Arrivals(items, events, send)
    began = engine.clock()
    while events.num_events or engine.has_work:
        events.run(engine.clock() - began)
        if engine.has_work:
            done = [request for request in engine.step() if request.finished]
            events.advance_to(engine.clock() - began)
            for request in done:
                arrivals.ended(served[request.request_id][0].item)
    for found, request in served.values():
        metrics = request.metrics
        assert metrics.first_token_s is not None and metrics.finished_s is not None
        found.first_token_s, found.finished_s = metrics.first_token_s - began, metrics.finished_s - began
        found.num_output, found.num_preemptions = metrics.num_output_tokens, metrics.num_preemptions
        found.finish_reason = str(request.completions[0].seq.finish_reason)
    return sorted((served_one for served_one, _ in served.values()), key=lambda one: one.item.index)


def make_engine(model: str, **settings: Any) -> Engine:
    """Creates the engine of a model, compiled; one without weights gets random ones.

    Args:
      settings: fields of `EngineConfig`.
    """
    from ksana_jax.engine.llm import LLM  # imports jax

    if not has_weights(model_path(model)):
        settings.setdefault("load_format", "dummy")
    llm = LLM(model, **settings)
    llm.warm_up()
    return llm.engine
