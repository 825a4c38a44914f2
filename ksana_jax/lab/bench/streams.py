"""`ksana bench streams`: the cost of streaming to many readers, compared with generating the same texts at once."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import Sequence
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.sources import MODEL_HELP
from ksana_jax.lab.bench.core import Bench, Case, option, spread
from ksana_jax.lab.bench.latency import make_llm
from ksana_jax.lab.bench.stream_server import StreamClient, read_over_http
from ksana_jax.lab.experiments.dotted import dotlist
from ksana_jax.lab.experiments.tasks.results import Column, Measurement, ResultRow
from ksana_jax.lab.simulator.cost import Cost, read_cost
from ksana_jax.lab.simulator.paced import pace
from ksana_jax.loading.config_json import load_config
from ksana_jax.tokenizers import Tokenizer, find_tokenizer
from ksana_jax.tokenizers.detokenizer import NOTHING, Piece

OFFLINE, BLOCKING, ASYNC, HTTP = "LLM.generate", "LLM.stream", "AsyncLLM", "HTTP"
WAYS = {"generate": OFFLINE, "stream": BLOCKING, "async": ASYNC, "http": HTTP}


@dataclasses.dataclass
class Streams(Bench):
    """Measures the throughput of as many streams as the engine has rows, read as deltas by tasks of one event loop.

    LLM.generate decodes each text once, at its end; LLM.stream reads all deltas in one loop, without an event loop. For
    HTTP, the server is in this process and the client, which only counts events, in another.
    Requests arrive at once; prompts are random token ids, decoding is greedy and ignores EOS."""

    model: str = option("ksana-tiny", MODEL_HELP)
    tokenizer: str | None = option(None, "directory of a tokenizer; for a model without one, ids are words")
    dtype: str = option("f32", "f32, bf16 or f16")
    streams: tuple[int, ...] = option((64,), "numbers of streams")
    prompt: int = option(32, "tokens of each prompt")
    output_tokens: int = option(128, "tokens that each stream receives")
    ways: tuple[str, ...] = option(("generate", "stream", "async"), f"ways to read: {', '.join(WAYS)}")
    seed: int = option(0, "seed of weights and prompts")
    paced: str | None = option(
        None, "costs of a device that takes its time in place of computing, as `ksana simulate validate --paced`"
    )

    def title(self) -> str:
        device = "" if self.paced is None else f" on a paced device ({self.paced})"
        lengths = f"prompts of {self.prompt}, {self.output_tokens} output tokens"
        return f"Streams of {self.model}{device}, {self.dtype}, {lengths}"

    def cases(self) -> list[Case]:
        counts = [("streams", n) for n in self.streams] + [(n, getattr(self, n)) for n in ("prompt", "output_tokens")]
        problems = [checks.integer(name, count) for name, count in counts]
        checks.require(*problems, checks.integer("seed", self.seed, 0, 2**32 - 1), error=ConfigError)
        for way in self.ways:
            if way not in WAYS:
                raise ConfigError(f"ways has {way!r:.40}, must have some of {', '.join(WAYS)}")
        if self.paced is not None:
            _cost(self.paced)
        labels = [label for way, label in WAYS.items() if way in self.ways]
        return [Case(label, {"streams": n}) for n in self.streams for label in labels]

    def start(self) -> None:
        self.client: StreamClient | None = None
        longest = self.prompt + self.output_tokens
        tokenizer = self.tokenizer or find_tokenizer(self.model)
        tokenizer = tokenizer or Words(load_config(self.model).vocab_size)
        settings = {"dtype": self.dtype, "seed": self.seed, "tokenizer": tokenizer, "max_model_len": longest}
        self.llm = make_llm(self.model, max_num_seqs=max(self.streams), **settings)
        if self.paced is None:
            self.llm.warm_up()
        else:
            pace(self.llm.engine, _cost(self.paced))
        gc.collect()
        gc.freeze()  # as a server does: collecting older objects stops all streams for 0.1 s
        if "http" in self.ways:
            self.client = StreamClient()

    def processes(self) -> list[int]:
        return [] if self.client is None else [self.client.pid]

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        gc.unfreeze()

    def _requests(self, count: int) -> tuple[Any, Any]:
        """Returns prompts and their sampling parameters."""
        import numpy as np

        from ksana_jax import SamplingParams

        most = min(self.llm.model_config.vocab_size, self.llm.get_tokenizer().vocab_size)
        ids = np.random.default_rng(self.seed).integers(3, most, (count, self.prompt))
        params = SamplingParams(temperature=0, max_tokens=self.output_tokens, ignore_eos=True)
        return [{"prompt_token_ids": row} for row in ids], params

    def measure(self, case: Case) -> Measurement:
        prompts, params = self._requests(case.point["streams"])
        began, cpu_s = time.perf_counter(), time.process_time()
        ways = {OFFLINE: self._offline, BLOCKING: self._blocking, ASYNC: self._async, HTTP: self._http}
        found = ways[case.label](prompts, params)
        cpu_s, num_tokens = time.process_time() - cpu_s, found.pop("num_tokens")
        seconds = found.pop("seconds", None) or time.perf_counter() - began
        return {"tokens_per_s": num_tokens / seconds, "cpu_s": cpu_s / num_tokens, **found}

    def _offline(self, prompts: Any, params: Any) -> Measurement:
        outputs = self.llm.generate(prompts, params)
        return {"num_tokens": sum(len(output.check().outputs[0].token_ids) for output in outputs)}

    def _blocking(self, prompts: Any, params: Any) -> Measurement:
        outputs = self.llm.stream(prompts, params, delta=True)
        return {"num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}

    def _async(self, prompts: Any, params: Any) -> Measurement:
        from ksana_jax import AsyncLLM

        async def read(stream: Any) -> tuple[int, int]:
            sizes = [len(output.outputs[0].token_ids) async for output in stream]
            return sum(sizes), len(sizes)

        async def serve() -> Measurement:
            async with AsyncLLM.around(self.llm) as llm:
                began = time.thread_time()
                streams = await llm.submit_all(prompts, params, delta=True)
                read_by_each = await asyncio.gather(*map(read, streams))
                cpu_s = time.thread_time() - began
            num_tokens, num_pieces = map(sum, zip(*read_by_each, strict=True))
            more = {"loop_s": cpu_s / num_tokens, "pieces_per_token": num_pieces / num_tokens}
            return {"num_tokens": num_tokens, **more}

        return asyncio.run(serve())

    def _http(self, prompts: Any, params: Any) -> Measurement:
        from ksana_jax import AsyncLLM

        assert self.client is not None
        client, ids = self.client, [prompt["prompt_token_ids"] for prompt in prompts]

        async def serve() -> dict[str, float]:
            async with AsyncLLM.around(self.llm) as llm:
                return await read_over_http(llm, client, ids, params.max_tokens)

        found = asyncio.run(serve())
        num_tokens = found["num_tokens"]
        return {
            "num_tokens": num_tokens,
            "seconds": found["seconds"],
            "loop_s": found["loop_cpu_s"] / num_tokens,
            "client_s": found["cpu_s"] / num_tokens,
            # The last event of each stream has its usage and no text.
            "pieces_per_token": (found["num_events"] - len(prompts)) / num_tokens,
        }

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("tokens_per_s", "tokens/s", lambda rate: f"{rate:,.0f}"),
            spread("tokens_per_s"),
            Column("cpu_s", "process, µs a token", _microseconds),
            Column("loop_s", "event loop, µs a token", _microseconds),
            Column("client_s", "client, µs a token", _microseconds),
            Column("pieces_per_token", "pieces a token", lambda pieces: f"{pieces:.2f}"),
        ]

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        rates = {(row.label, row.point["streams"]): row.mean("tokens_per_s") for row in rows}
        said = []
        for label in (ASYNC, HTTP):
            found = [
                f"{count} streams {rate / offline:.0%}"
                for count in self.streams
                if (offline := rates.get((OFFLINE, count))) and (rate := rates.get((label, count)))
            ]
            said += [f"{label}, of the throughput of LLM.generate: {', '.join(found)}."] if found else []
        return " ".join(said)

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        return [
            "Process: CPU time of this process, the model included. Event loop: that of its thread, in AsyncLLM with "
            "the readers, which count tokens and do nothing else. HTTP: from the first request, on connections made "
            "before, to the end of the last answer; the client is another process. Pieces: 1 if every token was read "
            "by itself; fewer if the readers were slower than the engine.",
            *super().notes(rows),
        ]


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def _cost(paced: str) -> Cost:
    """Returns the costs of a paced device, which are written as in YAML."""
    return read_cost(dotlist([f"paced={paced}"])["paced"])


class Words(Tokenizer):
    """Reads id 17 as the word " 17", for each id of a vocabulary."""

    source = "numbers"

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._pieces = [Piece(f" {token_id}".encode()) for token_id in range(vocab_size)]

    def piece(self, token_id: int) -> Piece:
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else NOTHING

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]
