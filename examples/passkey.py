"""A custom task in one file: does the model still find a number hidden in a long text under an attention pattern?

Run it, from any folder:

  ksana run examples/passkey.yaml

A task consists of a dataclass of settings, `run` (one trial's measurements), `summarise` (a trial's numbers) and
`columns` (the table). Seeds, resumption, shards, tables with deviations and a figure come for free. Optional parts,
such as checks of its settings or a custom figure, are in `ksana_jax.lab.runs.tasks.base.BaseTask`.

Source of the question: Mohtashami and Jaggi, arXiv:2305.16300, section 4.2.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ksana_jax import SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.tasks.base import BaseTask, Column, Measurement, ResultRow, TrialContext

_FILLER = "    pass\n"


@dataclasses.dataclass
class PasskeySettings:
    """Fields of `settings` in the YAML file.

    num_prompts: prompts per trial, each with a key and a position that are drawn by the seed.
    num_filler_lines: lines of filler before the question; the key is somewhere among them.
    max_model_len: maximum tokens of a prompt and its answer.
    """

    num_prompts: int = 10
    num_filler_lines: int = 40
    max_model_len: int = 256


class Passkey(BaseTask):
    """Asks in the last line of a program for five digits that an earlier line assigned."""

    Settings = PasskeySettings

    def max_model_len(self, settings: PasskeySettings) -> int:
        return settings.max_model_len

    def check(self, config: Mapping[str, Any]) -> None:
        if (count := config["settings"]["num_prompts"]) < 1:
            raise ConfigError(f"settings.num_prompts is {count}, must be at least 1")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings = PasskeySettings(**trial.config["settings"])
        rng = random.Random(trial.seed)
        keys = [f"{rng.randrange(100_000):05d}" for _ in range(settings.num_prompts)]
        prompts = [_prompt(key, rng.randrange(settings.num_filler_lines), settings) for key in keys]
        params = SamplingParams(max_tokens=8, temperature=0)
        for done, (key, output) in enumerate(zip(keys, trial.llm.generate(prompts, params), strict=True), start=1):
            answer = output.outputs[0].text
            yield {"metric": "answer", "key": key, "answer": answer, "found": answer.startswith(key)}
            trial.progress(done / len(keys))

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        return {"recall": sum(m["found"] for m in measurements) / len(measurements)}

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [Column("recall", "keys found, %", lambda value: f"{100 * value:.0f}", "max")]


def _prompt(key: str, line: int, settings: PasskeySettings) -> str:
    lines = [_FILLER] * settings.num_filler_lines
    lines.insert(line, f"PASSKEY = '{key}'\n")
    return "".join(lines) + "PASSKEY = '"
