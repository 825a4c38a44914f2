"""Latency that HTTP adds to an engine: `ksana bench experiments.benches.over_http:OverHTTP`."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import socket
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ksana_jax.core.sources import MODEL_HELP
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.lab.bench.core import Bench, Case, option
from ksana_jax.lab.bench.latency import make_llm
from ksana_jax.lab.bench.serving_load import LoadTarget, send_all
from ksana_jax.lab.bench.serving_targets import EngineTarget, HTTPTarget
from ksana_jax.lab.runs.machine_load import seconds_of
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, milliseconds, number
from ksana_jax.scheduler.step.types import StepInput, StepOutput
from ksana_jax.serve.server.running import listen, serve
from ksana_jax.serve.server.settings import ServerSettings
from ksana_jax.serve.workload.report import flat, summarise
from ksana_jax.serve.workload.synthetic import Synthetic

INSIDE, HTTP, PERCENTS = "in process", "HTTP", (10, 50, 90, 99)
PROMPT, OUTPUT = 128, 96  # tokens at most
_SPAWN = multiprocessing.get_context("spawn")


@dataclasses.dataclass
class OverHTTP(Bench):
    """Sends the same requests to an engine in this process and to one behind HTTP in another, in turn.

    What HTTP adds to the time to the first token (TTFT) is a difference for each request. With step_ms, a step takes
    that long and no processor, as on an accelerator; all tokens are then equal."""

    model: str = option("ksana-tiny", MODEL_HELP)
    step_ms: float = option(0.0, "milliseconds of a step that computes nothing; 0 computes the model's")
    requests: int = option(400, "number of requests")
    rate: float = option(40.0, "requests per second")
    max_num_seqs: int = option(64, "rows of the engine, and most requests that are open at once")
    seed: int = option(2, "seed of gaps, lengths and texts")

    def title(self) -> str:
        return f"{self.model} in process and over HTTP, {self.rate:g} requests/s"

    def cases(self) -> list[Case]:
        sizes = {"prompt": [16, PROMPT], "output": [64, OUTPUT], "num_requests": self.requests}
        self.load = Synthetic(rate=self.rate, seed=self.seed, oracle=True, **sizes)
        return [Case(INSIDE, {}), Case(HTTP, {})]

    def start(self) -> None:
        given = self.model, self.step_ms, self.max_num_seqs
        self.runner, self.num_turns = asyncio.Runner(), 0
        with listen(ServerSettings(port=0)) as listener:
            url = "http://{}:{}".format(*listener.getsockname())
            self.server = _SPAWN.Process(target=_serve, args=(listener, *given), daemon=True)
            self.server.start()
        self.llm, self.http = _engine(*given), HTTPTarget(url)
        self.targets: dict[str, LoadTarget] = {INSIDE: EngineTarget(self.llm, detokenize=True), HTTP: self.http}
        while b"ready" not in urllib.request.urlopen(f"{url}/health").read():
            time.sleep(0.2)
        self.runner.run(self.http.open(None))

    def turn(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Measurement]]:
        self.num_turns += 1
        load = dataclasses.replace(self.load, text_seed=self.num_turns)
        found = {case.label: self._send(case.label, load) for case in cases}
        added = np.percentile(found[HTTP].pop("first_s") - found[INSIDE].pop("first_s"), PERCENTS).tolist()
        found[HTTP] |= {f"added_p{percent}_s": value for percent, value in zip(PERCENTS, added, strict=True)}
        yield from ((case, found[case.label]) for case in cases)

    def _send(self, label: str, load: Synthetic) -> Measurement:
        made, [pid] = load.make(self.llm.model_config.vocab_size), self.processes()
        began = time.process_time(), seconds_of(pid)
        sent = self.runner.run(send_all(made, self.targets[label], max_concurrency=self.max_num_seqs))
        found = summarise(sent.times)
        assert found["num_finished"] == load.num_requests, found["failures"]
        here, server = np.subtract((time.process_time(), seconds_of(pid)), began) * 1e6 / found["num_output_tokens"]
        first_s = np.array([one.ttft_s for one in sent.times])
        return {**flat(found), "here_us": float(here), "server_us": float(server), "first_s": first_s}

    def processes(self) -> list[int]:
        return [self.server.pid or 0]

    def close(self) -> None:
        self.runner.run(self.http.close())
        self.runner.run(self.llm.aclose())
        self.runner.close()
        self.server.terminate()

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        times = [("ttft_p50_s", "TTFT p50, ms"), ("ttft_p99_s", "TTFT p99, ms"), ("tpot_p50_s", "TPOT p50, ms")]
        times += [(f"added_p{percent}_s", f"added p{percent}, ms") for percent in PERCENTS]
        cpu = [("here_us", "CPU here, µs/token"), ("server_us", "CPU of the server, µs/token")]
        return [Column(*of, milliseconds()) for of in times] + [Column(*of, number(0)) for of in cpu]


def _engine(model: str, step_ms: float, max_num_seqs: int) -> AsyncLLM:
    llm = make_llm(model, max_num_seqs=max_num_seqs, max_model_len=PROMPT + OUTPUT)
    if step_ms:
        assert llm.tokenizer is not None
        token, free_s = llm.tokenizer.encode("a", add_special_tokens=False)[-1], 0.0

        def submit(step: StepInput) -> StepOutput:
            nonlocal free_s
            free_s = ends_s = max(free_s, time.perf_counter()) + step_ms / 1000
            tokens = np.full(step.num_sampled, token, np.int32)
            return StepOutput(tokens, fetch=lambda _: time.sleep(max(ends_s - time.perf_counter(), 0)))

        llm.engine.executor.submit = submit  # pyright: ignore[reportAttributeAccessIssue]
    else:
        llm.warm_up()
    return AsyncLLM.around(llm)


def _serve(listener: socket.socket, *given: Any) -> None:
    serve(lambda: _engine(*given), ServerSettings(port=0), listener)
