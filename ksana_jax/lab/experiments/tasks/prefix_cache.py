"""Gain from a prefix cache: prompts with a common prefix, served with and without enable_prefix_caching.

The trial's engine is the side "with". The side "without" is a second engine with the same weights, and the settings
`against` in place of the first one's: by default, no caching and no shared-prefix attention. Every run has its own
salt, so requests find only blocks computed in the same run; the pool stays full of blocks of earlier runs, so that
replacement is part of the measurement.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.experiments.asking import forced
from ksana_jax.lab.experiments.figures import COLOURS, bars, legend
from ksana_jax.lab.experiments.tasks.base import TrialContext, int_field
from ksana_jax.lab.experiments.tasks.paired import (
    PairedTask,
    caveat,
    check_against,
    of_side,
    other_engine,
    speeds,
    timed,
)
from ksana_jax.lab.experiments.tasks.results import (
    Column,
    Measurement,
    ResultRow,
    compilation_note,
    milliseconds,
    number,
    of_metric,
    percent,
    preemption_note,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ksana_jax import LLM

WITHOUT_CACHE = {"enable_prefix_caching": False, "shared_prefix_attention": False}


@dataclasses.dataclass
class PrefixSettings:
    """Fields of `settings` in a prefix_cache experiment.

    num_requests: number of requests, all submitted at the start.
    prompt_tokens: tokens of each prompt, drawn at random by the seed.
    output_tokens: tokens of each output, greedy, regardless of EOS.
    shared_percent: percentage of each prompt that is a shared prefix, rounded down to whole tokens.
    num_prefixes: number of different prefixes; request i has prefix i modulo num_prefixes.
    num_pairs: timed runs of each side.
    against: settings of the side "without" where it differs; fields of `EngineConfig`. Empty takes away the cache and
      shared-prefix attention.
    """

    num_requests: int = int_field(32)
    prompt_tokens: int = int_field(320)
    output_tokens: int = int_field(24)
    shared_percent: int = int_field(80, 0, 100)
    num_prefixes: int = int_field(1)
    num_pairs: int = int_field(1)
    against: dict[str, Any] = dataclasses.field(default_factory=dict, metadata={"engine": True})


class PrefixCache(PairedTask):
    """The task `prefix_cache`. See the module's docstring."""

    Settings = PrefixSettings

    def check(self, config: Mapping[str, Any]) -> None:
        if not config["engine"]["enable_prefix_caching"]:
            raise ConfigError("engine.enable_prefix_caching is false, must be true: there is nothing to compare")
        check_against(config, config["settings"]["against"])

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings, llm = PrefixSettings(**trial.config["settings"]), trial.llm
        plain = other_engine(trial, settings.against or WITHOUT_CACHE)
        prompts = make_prompts(settings, llm.model_config.vocab_size, trial.seed)
        params = [forced(settings.output_tokens, temperature=0)] * len(prompts)
        yield {"metric": "setting", **dataclasses.asdict(settings)}

        def serve(engine: LLM, salt: str) -> Measurement:
            return timed(engine, [{"prompt_token_ids": ids, "cache_salt": salt} for ids in prompts], params)

        yield from self.measure(trial, functools.partial(serve, plain), functools.partial(serve, llm))

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes gain, seconds without / seconds with; and hit_rate, fraction of prompt tokens found in the cache."""
        runs = of_side(measurements, "with")
        return {**speeds(measurements), "hit_rate": sum(m["hit_rate"] for m in runs) / len(runs)}

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("hit_rate", "hits, %", percent(), exact=True),
            Column("tokens_per_s_without", "tokens/s without", number(1)),
            Column("tokens_per_s_with", "tokens/s with", number(1)),
            Column("gain", "gain, ×", number(2), "max"),
            Column("ttft_s_without", "TTFT without, ms", milliseconds(0)),
            Column("ttft_s_with", "TTFT with, ms", milliseconds(0)),
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        return [
            "Tokens/s: output tokens, time includes prompts. Hits: fraction of the prompt tokens found in the cache.",
            "Gain: seconds without / seconds with, in alternating runs, median over the pairs of a seed.",
            "No run finds its own prompts in the cache at its start; TTFT: mean over requests that all arrive at once.",
            "KsanaLLM's article claims 1.6 times the throughput if 80 % of each prompt is shared.",
            *compilation_note(rows),
            *preemption_note(rows, "num_preemptions_with"),
        ]

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        other = sorted({_said(against) for m in of_metric(rows, "setting") if (against := m.get("against"))})
        gains = [
            f"{gain:.2f} ({'; '.join(filter(None, [row.name, caveat(row)]))})"
            for row in rows
            if (gain := row.mean("gain")) is not None
        ]
        sides = (
            f"as a multiple of that with {'; '.join(other)}"
            if other
            else "with the cache, as a multiple of that without"
        )
        return f"Throughput {sides}: {', '.join(gains)}." if gains else ""

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws output tokens/s of both sides, as a pair of bars per row labelled with the gain."""
        axes = figure.subplots()
        measured = [r for r in rows if r.trials][::-1]
        at = np.arange(len(measured))
        for offset, side, colour in ((0.2, "without", COLOURS[5]), (-0.2, "with", COLOURS[1])):
            means = [r.mean(f"tokens_per_s_{side}") or 0.0 for r in measured]
            spread = [r.sd(f"tokens_per_s_{side}") or 0.0 for r in measured]
            style = {"color": colour, "label": side, "error_kw": {"linewidth": 0.6}}
            bars(axes, (at + offset).tolist(), means, 0.38, spread, **style)
            if side == "with":
                for y, row, mean, sd in zip(at + offset, measured, means, spread, strict=True):
                    if math.isfinite(end := mean + sd):
                        axes.annotate(f" {row.mean('gain') or 0:.2f}×", (end, y), va="center", fontsize=6)
        axes.set_yticks(at, [r.name for r in measured])
        axes.margins(x=0.15)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("output tokens/s")
        legend(figure, axes)


def _said(against: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in against.items())


def make_prompts(settings: PrefixSettings, vocab_size: int, seed: int) -> list[list[int]]:
    """Returns prompts of random tokens, whose first shared_percent cycle through num_prefixes prefixes."""
    rng = np.random.default_rng(seed)
    shared = settings.prompt_tokens * settings.shared_percent // 100
    prefixes = rng.integers(0, vocab_size, (settings.num_prefixes, shared))
    own = rng.integers(0, vocab_size, (settings.num_requests, settings.prompt_tokens - shared))
    return [[*prefixes[i % len(prefixes)].tolist(), *tail.tolist()] for i, tail in enumerate(own)]
