"""A task of your own in one file: is a number that was hidden in a long text still found under an attention pattern?

Run it, from the folder of this file or with the folder on the Python path:

  ksana run passkey.yaml

A task is a dataclass of settings, `run` (one trial's measurements), `summarise` (a trial's numbers) and `columns` (what
the table shows). Seeds, resumption, shards, tables with spreads and a figure come with it. What else a task may give,
such as checks of its settings or a figure of its own, is in `ksana_jax.experiments.tasks.base.BaseTask`.

Source of the question: Mohtashami and Jaggi, arXiv:2305.16300, section 4.2.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ksana_jax import SamplingParams
from ksana_jax.config import ConfigError
from ksana_jax.experiments.tasks.base import BaseTask, Column, Measurement, ResultRow, TrialContext

_FILLER = "    pass\n"


@dataclasses.dataclass
class PasskeySettings:
    """Fields of `settings` in the YAML file.

    num_prompts: prompts of a trial, each with a key and a place for it that the seed draws.
    num_filler_lines: lines of filler before the question; the key stands somewhere among them.
    max_model_len: most tokens of a prompt and its answer.
    """

    num_prompts: int = 10
    num_filler_lines: int = 40
    max_model_len: int = 256


class Passkey(BaseTask):
    """Five digits are assigned in a line of a program, and asked for in its last one."""

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
