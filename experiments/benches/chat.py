"""Time to the first token of a chat's last turn, with and without a prefix cache:
`ksana bench experiments.benches.chat:Chat`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.bench.core import Bench, Case, option, spread
from ksana_jax.lab.bench.latency import make_llm
from ksana_jax.lab.runs.asking import forced
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, milliseconds

WITH, WITHOUT = "with cache", "without"


@dataclasses.dataclass
class Chat(Bench):
    """Measures the time to the first token of the last turn of a chat, whose prompt is all that was said before and a
    new question, with a prefix cache and without, for several models. Questions are random tokens."""

    models: tuple[str, ...] = option(("qwen3.5-135m", "llama-135m"), "models; those without weights get random ones")
    dtype: str = option("f32", "f32, bf16 or f16")
    turns: int = option(8, "turns of a chat, the measured one included")
    question_tokens: int = option(128, "tokens of each question")
    answer_tokens: int = option(32, "tokens of each answer before the last turn")
    snapshots: str = option("prompt_end", "where states of recurrent layers are cached, a key of STATE_SNAPSHOTS")
    recurrent: str = option("auto", "implementation of recurrent layers: auto, native or xla")
    seed: int = option(0, "seed of weights and questions")

    def title(self) -> str:
        return f"First token of turn {self.turns} of a chat, {self.dtype}"

    def cases(self) -> list[Case]:
        sizes = {name: getattr(self, name) for name in ("turns", "question_tokens", "answer_tokens")}
        checks.require(*(checks.integer(name, size) for name, size in sizes.items()), error=ConfigError)
        return [Case(f"{model}, {cache}", {}) for model in self.models for cache in (WITHOUT, WITH)]

    def start(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        longest = self.turns * (self.question_tokens + self.answer_tokens)
        settings = {"dtype": self.dtype, "seed": self.seed, "max_num_seqs": 1, "max_model_len": longest}
        settings |= {"operators": {"recurrent": self.recurrent}, "state_snapshots": {"method": self.snapshots}}
        self.llms = {
            f"{model}, {cache}": make_llm(model, **settings, enable_prefix_caching=cache == WITH)
            for model in self.models
            for cache in (WITHOUT, WITH)
        }
        for llm in self.llms.values():
            llm.warm_up(longest)

    def measure(self, case: Case) -> Measurement:
        llm, text = self.llms[case.label], []
        for turn in range(1, self.turns + 1):
            text += self.rng.integers(3, llm.model_config.vocab_size, self.question_tokens).tolist()
            params = forced(1 if turn == self.turns else self.answer_tokens, temperature=0)
            began, cpu = time.perf_counter(), time.process_time()
            [output] = llm.generate([{"prompt_token_ids": text}], params)
            found = {"first_token_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
            text += output.check().outputs[0].token_ids
        return found | {"prompt_tokens": len(text) - 1, "cached_tokens": output.num_cached_tokens}

    # ------------------------------------------------------------------ results

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("first_token_s", "first token, ms", milliseconds()),
            spread("first_token_s"),
            Column("cpu_s", "CPU time, ms", milliseconds()),
            Column("prompt_tokens", "prompt tokens", lambda value: f"{value:,.0f}", exact=True),
            Column("cached_tokens", "of them cached", lambda value: f"{value:,.0f}", exact=True),
        ]

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        """Compares the first tokens with and without the cache."""
        seconds = {row.label: found for row in rows if (found := row.mean("first_token_s"))}
        ratios = {
            model: seconds[f"{model}, {WITH}"] / seconds[f"{model}, {WITHOUT}"]
            for model in self.models
            if {f"{model}, {WITH}", f"{model}, {WITHOUT}"} <= {*seconds}
        }
        return " ".join(f"{model}: {ratio:.2f} of the time without a cache." for model, ratio in ratios.items())
