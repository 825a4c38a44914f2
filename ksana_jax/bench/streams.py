"""`ksana bench streams`: what streaming to many readers costs, compared with generating the same texts at once."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from ksana_jax import checks
from ksana_jax.bench.core import Bench, Case, option, spread
from ksana_jax.bench.latency import make_llm
from ksana_jax.errors import ConfigError
from ksana_jax.experiments.tasks.results import Column, Measurement, ResultRow

OFFLINE, BLOCKING, ASYNC = "LLM.generate", "LLM.stream", "AsyncLLM"


@dataclasses.dataclass
class Streams(Bench):
    """Measures the throughput of as many streams as the engine has rows, read as deltas by tasks of one event loop.

    LLM.generate decodes each text once, at its end; LLM.stream reads all deltas in one loop, without an event loop.
    Requests arrive at once; prompts are random token ids, decoding is greedy and ignores EOS."""

    model: str = option("ksana-tiny", "a Hugging Face directory, or the name of a shipped model")
    tokenizer: str | None = option(None, "directory of a tokenizer, for a model without one")
    dtype: str = option("f32", "f32, bf16 or f16")
    streams: tuple[int, ...] = option((64,), "numbers of streams")
    prompt: int = option(32, "tokens of each prompt")
    output_tokens: int = option(128, "tokens that each stream receives")
    seed: int = option(0, "seed of weights and prompts")

    def title(self) -> str:
        return f"Streams of {self.model}, {self.dtype}, prompts of {self.prompt}, {self.output_tokens} output tokens"

    def cases(self) -> list[Case]:
        counts = [("streams", n) for n in self.streams] + [(n, getattr(self, n)) for n in ("prompt", "output_tokens")]
        checks.require(*(checks.integer(name, count) for name, count in counts), error=ConfigError)
        return [Case(label, {"streams": n}) for n in self.streams for label in (OFFLINE, BLOCKING, ASYNC)]

    def start(self) -> None:
        longest = self.prompt + self.output_tokens
        settings = {"dtype": self.dtype, "seed": self.seed, "tokenizer": self.tokenizer, "max_model_len": longest}
        self.llm = make_llm(self.model, max_num_seqs=max(self.streams), **settings)
        if self.llm.tokenizer is None:
            raise ConfigError(f"tokenizer: {self.model} has none, and streams are of text: give a directory of one")
        self.llm.warm_up()
        gc.collect()
        gc.freeze()  # as a server does: a collection of what was there before stops all streams for 0.1 s

    def close(self) -> None:
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
        ways: dict[str, Callable[[Any, Any], tuple[int, dict[str, float]]]] = {
            OFFLINE: self._offline,
            BLOCKING: self._blocking,
            ASYNC: lambda *given: asyncio.run(self._async(*given)),
        }
        began = time.perf_counter()
        num_tokens, more = ways[case.label](prompts, params)
        return {"tokens_per_s": num_tokens / (time.perf_counter() - began)} | more

    def _offline(self, prompts: Any, params: Any) -> tuple[int, dict[str, float]]:
        outputs = self.llm.generate(prompts, params)
        return sum(len(output.check().outputs[0].token_ids) for output in outputs), {}

    def _blocking(self, prompts: Any, params: Any) -> tuple[int, dict[str, float]]:
        return sum(len(o.outputs[0].token_ids) for o in self.llm.stream(prompts, params, delta=True)), {}

    async def _async(self, prompts: Any, params: Any) -> tuple[int, dict[str, float]]:
        from ksana_jax import AsyncLLM

        async def read(stream: Any) -> tuple[int, int]:
            sizes = [len(output.outputs[0].token_ids) async for output in stream]
            return sum(sizes), len(sizes)

        async with AsyncLLM.around(self.llm) as llm:
            began = time.thread_time()
            streams = await llm.submit_all(prompts, params, delta=True)
            read_by_each = await asyncio.gather(*map(read, streams))
            cpu_s = time.thread_time() - began
        num_tokens, num_pieces = map(sum, zip(*read_by_each, strict=True))
        return num_tokens, {"loop_s": cpu_s / num_tokens, "pieces_per_token": num_pieces / num_tokens}

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("tokens_per_s", "tokens/s", lambda rate: f"{rate:,.0f}"),
            spread("tokens_per_s"),
            Column("loop_s", "event loop, µs a token", lambda seconds: f"{seconds * 1e6:,.1f}"),
            Column("pieces_per_token", "pieces a token", lambda pieces: f"{pieces:.2f}"),
        ]

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        rates = {(row.label, row.point["streams"]): row.mean("tokens_per_s") for row in rows}
        found = []
        for count in self.streams:
            offline, served = rates.get((OFFLINE, count)), rates.get((ASYNC, count))
            if offline and served:
                found.append(f"{count} streams {served / offline:.0%}")
        return f"AsyncLLM, of the throughput of LLM.generate: {', '.join(found)}." if found else ""

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        return [
            "Event loop: CPU time of its thread, the readers' included; they count tokens and do nothing else. Pieces: "
            "1 if every token was read by itself; fewer if the readers were slower than the engine.",
            *super().notes(rows),
        ]
