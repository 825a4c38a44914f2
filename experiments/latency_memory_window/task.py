"""Latency per generated token and KV memory of a window with sinks, against recomputing the window for each token.

Both predict a token from the `pattern.window` tokens before it, and alternate on one engine. Prompts are random token
ids: time and memory do not depend on them, so models with random weights will do.

Source: StreamingLLM, arXiv:2309.17453, section 4.5 and figure 10, whose x axis is the size of the cache.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.asking import forced, run_warm
from ksana_jax.lab.runs.figures import legend, plain_numbers
from ksana_jax.lab.runs.tasks.base import BaseTask, TrialContext, int_field
from ksana_jax.lab.runs.tasks.results import (
    Column,
    Measurement,
    ResultRow,
    compilation_note,
    kib,
    milliseconds,
    number,
)
from ksana_jax.lab.runs.tasks.row_figure import against_numbers, draw_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ksana_jax import LLM

# Panels of the figure: title, scale and base of the logarithm, by the key of a side's number.
_DRAWN = {"s": ("ms per token", 1e-3, 10), "kv_bytes": ("KV (MiB)", 2.0**20, 2)}
_SIDES = ("streamed", "recomputed")
_TITLES = {"streamed": "sinks + window", "recomputed": "recomputation"}


@dataclasses.dataclass
class WindowLatencySettings:
    """Fields of `settings` in the YAML file.

    num_streamed: tokens to generate with the window as a cache, after a prompt that fills it.
    num_recomputed: tokens to generate by recomputing the window.
    """

    num_streamed: int = int_field(32, 2)
    num_recomputed: int = int_field(2)


class WindowLatency(BaseTask):
    """The task of this study. See the module's docstring."""

    Settings = WindowLatencySettings

    def check(self, config: Mapping[str, object]) -> None:
        pattern = config["pattern"]
        if not isinstance(pattern, Mapping) or pattern["window"] is None:
            raise ConfigError("WindowLatency needs pattern.window")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings, pattern, llm = WindowLatencySettings(**trial.config["settings"]), trial.config["pattern"], trial.llm
        window = pattern["window"]
        # The first generated token already pushes another one out.
        rng, num_prompt = np.random.default_rng(trial.seed), window + pattern["num_sinks"] + 1
        prompt = rng.integers(0, llm.model_config.vocab_size, num_prompt).tolist()
        work: dict[str, Callable[[], float]] = {
            "streamed": lambda: _stream(llm, prompt, settings.num_streamed),
            "recomputed": lambda: _recompute(llm, prompt, window, settings.num_recomputed),
        }
        # Seeds alternate which side runs first.
        for side in _SIDES if trial.seed % 2 == 0 else _SIDES[::-1]:
            yield {"metric": "side", "side": side, **_measured(llm, work[side])}
            trial.progress(0.5)

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes for each side its seconds per token and peak KV; speedup: recomputed / streamed seconds."""
        result = {}
        for m in measurements:
            result[f"{m['side']}_s"] = m["token_s"]
            result[f"{m['side']}_kv_bytes"] = m["peak_blocks"] * m["block_bytes"]
        result["compiled_while_timed"] = sum(m["compiled_while_timed"] for m in measurements)
        return result | {"speedup": result["recomputed_s"] / result["streamed_s"]}

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            *(Column(f"{side}_s", f"{_TITLES[side]}, ms/token", milliseconds()) for side in _SIDES),
            Column("speedup", "times faster", number(1)),
            *(Column(f"{side}_kv_bytes", f"{_TITLES[side]}, KV, KiB", kib, exact=True) for side in _SIDES),
        ]

    def headline(self, rows: Sequence[ResultRow]) -> Column | None:
        return next(column for column in self.columns(rows) if column.key == "speedup")

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        return [
            "Both sides of a row ran in turn on one engine, for one request. ms/token: mean over generated tokens, "
            "without the prompt of the streamed side. KV: maximum held within a step that generates a token.",
            *compilation_note(rows),
        ]

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws latency above and KV below over the last key of the grid, a line for each side."""
        measured = [row for row in rows if row.trials]
        if not against_numbers(measured):
            super().draw(figure, rows)
            return
        lines = [
            dataclasses.replace(row, label=_TITLES[side], values={key: row.values[f"{side}_{key}"] for key in _DRAWN})
            for side in _SIDES
            for row in measured
        ]
        panels = draw_panels(figure, lines, [(key, title, scale) for key, (title, scale, _) in _DRAWN.items()])
        for axes, (_, _, base) in zip(panels, _DRAWN.values(), strict=True):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=base)
            plain_numbers(axes.xaxis, axes.yaxis)
        legend(figure, panels[0])


def _measured(llm: LLM, work: Callable[[], float]) -> Measurement:
    """Runs work that returns its seconds per token; again if that compiled something."""
    token_s, _, compiled = run_warm(llm, work)
    # A step that generates a token ends a prompt or computes one token; of the streamed side, its prompt is left out.
    records = list(llm.records)
    decodes = [r for r in records if r.num_tokens == 1] or records
    return {
        "token_s": token_s,
        "compiled_while_timed": compiled,
        "block_bytes": llm.block_bytes,
        "peak_blocks": max(int(r.peak_blocks) for r in decodes),
    }


def _stream(llm: LLM, prompt: list[int], num_tokens: int) -> float:
    [output] = llm.generate([{"prompt_token_ids": prompt}], forced(num_tokens, temperature=0))
    token_s = output.check().metrics.tpot_s
    assert token_s is not None
    return token_s


def _recompute(llm: LLM, prompt: list[int], window: int, num_tokens: int) -> float:
    from ksana_jax.engine import recompute

    began = time.perf_counter()
    recompute.generate(llm, prompt, window, num_tokens)
    return (time.perf_counter() - began) / num_tokens
