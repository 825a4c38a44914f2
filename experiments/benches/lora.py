"""Compares decode steps whose rows have adapters with the same steps of an engine without adapters."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.sources import MODEL_HELP
from ksana_jax.lab.bench.core import Bench, Case, option, spread
from ksana_jax.lab.bench.latency import decode_seconds, make_llm
from ksana_jax.lab.runs.asking import forced
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, milliseconds

WITHOUT, NONE, ADAPTED = "without adapters", "no row has one", "each row has one"
PROMPT = 32


@dataclasses.dataclass
class Lora(Bench):
    """Measures the time of decode steps with adapters, assigned to rows in turn, and without.

    Adapters are random and change every matrix. Both engines have the same weights and serve the same prompts of 32
    tokens.
    """

    model: str = option("bench-s", MODEL_HELP)
    dtype: str = option("f32", "f32, bf16 or f16")
    rows: tuple[int, ...] = option((1, 8, 32, 64), "rows of a step")
    adapters: int = option(8, "number of adapters, all of them on the device")
    rank: int = option(16, "rank of the adapters")
    output_tokens: int = option(32, "tokens that each row generates")
    linear: str = option("auto", "implementation of products: auto, packed, mixed, native or xla")
    quantization: str | None = option(None, "of the model's weights: int8, w8a8 or stored")
    seed: int = option(0, "seed of weights, adapters and prompts")

    def title(self) -> str:
        kind = self.dtype if self.quantization is None else f"{self.dtype}, {self.quantization}"
        return f"Decode steps of {self.model}, {kind}, with {self.adapters} adapters of rank {self.rank}"

    def cases(self) -> list[Case]:
        checks.require(
            *(checks.integer("rows", count) for count in self.rows),
            checks.integer("adapters", self.adapters),
            checks.integer("rank", self.rank),
            checks.integer("output_tokens", self.output_tokens, 2),
            error=ConfigError,
        )
        return [Case(label, {"rows": count}) for count in self.rows for label in (WITHOUT, NONE, ADAPTED)]

    def start(self) -> None:
        from experiments.training.adapter_export import export_adapter, random_adapter
        from ksana_jax import LoRARequest

        settings: dict[str, Any] = {
            "dtype": self.dtype,
            "quantization": self.quantization,
            "operators": {"linear": self.linear},
            "seed": self.seed,
            "max_num_seqs": max(self.rows),
            "max_model_len": PROMPT + self.output_tokens,
        }
        slots = {"enable_lora": True, "max_loras": self.adapters, "max_lora_rank": self.rank}
        without, adapted = make_llm(self.model, **settings), make_llm(self.model, **settings, **slots)
        self.llms = {WITHOUT: without, NONE: adapted, ADAPTED: adapted}
        self.folder = tempfile.TemporaryDirectory()
        self.requests = []
        for number in range(self.adapters):
            folder = Path(self.folder.name) / str(number)
            pairs = random_adapter(adapted.model_config, self.rank, self.seed + number)
            export_adapter(folder, pairs, self.rank, self.rank)
            self.requests.append(LoRARequest(f"adapter {number}", 1 + number, str(folder)))

    def turn(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Measurement]]:
        seconds = {case.name: self._step_s(case) for case in cases}
        for case in cases:
            without = seconds[Case(WITHOUT, case.point).name]
            yield case, {"step_s": seconds[case.name], "ratio": seconds[case.name] / without}

    def _step_s(self, case: Case) -> float:
        import numpy as np

        llm, count = self.llms[case.label], case.point["rows"]
        rng = np.random.default_rng(self.seed)
        prompts = rng.integers(3, llm.model_config.vocab_size, (count, PROMPT))
        each = [self.requests[row % len(self.requests)] for row in range(count)]
        llm.clear_records()
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            forced(self.output_tokens, temperature=0),
            lora_request=each if case.label == ADAPTED else None,
        )
        for output in outputs:
            output.check()
        seconds = decode_seconds(llm.records, count)
        assert seconds is not None, "no two decode steps in succession"
        return seconds

    def close(self) -> None:
        self.folder.cleanup()

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("step_s", "decode step, ms", milliseconds()),
            spread("step_s"),
            Column("ratio", "of the step without", lambda value: f"{value:.2f}"),
            spread("ratio"),
        ]
