"""Agreement of two engines that serve the same texts: tokens, log-probabilities, and the time that both take.

The trial's engine is the side "with". The side "without" has the settings `against` instead of its own. Both generate
greedily after the same prompts, all submitted at once. Log-probabilities are compared as long as both sides have
generated the same tokens, since after that their texts differ. With a prefix cache, a run finds the blocks of the runs
before it.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs import texts
from ksana_jax.lab.runs.asking import forced
from ksana_jax.lab.runs.figures import COLOURS, legend
from ksana_jax.lab.runs.tasks.base import INPUT_TEXTS, TrialContext, int_field
from ksana_jax.lab.runs.tasks.paired import PairedTask, check_against, of_side, other_engine, speeds, timed
from ksana_jax.lab.runs.tasks.results import (
    Column,
    Measurement,
    ResultRow,
    compilation_note,
    number,
    of_metric,
    percent,
    words,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

    from ksana_jax import LLM

# Start of a logarithmic axis; float32 has a resolution of 6e-8 near 1.
LEAST_DRAWN = 1e-9


@dataclasses.dataclass
class AgreementSettings:
    """Fields of `settings` in an agreement experiment.

    against: settings of the other engine where it differs, such as {dtype: f32}; fields of `EngineConfig`.
    texts: sources of the prompts: files, folders, patterns or file.jsonl#field, see `lab.runs.text_files`;
      relative to the YAML file. Empty takes the held-out texts. The seed draws among them. A model without a tokenizer
      gets random tokens.
    num_texts: number of prompts.
    prompt_tokens: tokens of each prompt, BOS included.
    output_tokens: tokens generated greedily after each, regardless of EOS.
    num_pairs: timed runs of each side.
    """

    against: dict[str, Any] = dataclasses.field(default_factory=dict, metadata={"engine": True})
    texts: list[str] = dataclasses.field(default_factory=list, metadata=INPUT_TEXTS)
    num_texts: int = int_field(16)
    prompt_tokens: int = int_field(96)
    output_tokens: int = int_field(96)
    num_pairs: int = int_field(1)


class Agreement(PairedTask):
    """The task `agreement`. See the module's docstring."""

    Settings = AgreementSettings

    def check(self, config: Mapping[str, Any]) -> None:
        settings = AgreementSettings(**config["settings"])
        check_against(config, settings.against)
        if config["engine"]["kv_eviction"] is not None:
            raise ConfigError("engine.kv_eviction is set, must be null: trials would change it in one engine alone")
        texts.check_config(config, settings.num_texts, texts.ExcerptSpec(settings.prompt_tokens), "settings.num_texts")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings, llm = AgreementSettings(**trial.config["settings"]), trial.llm
        other = other_engine(trial, settings.against)
        drawn = texts.prompts_for(llm, settings.texts, settings.num_texts, settings.prompt_tokens, trial.seed)
        prompts = [{"prompt_token_ids": ids} for ids in drawn]
        params = forced(settings.output_tokens, temperature=0)
        yield {"metric": "setting", **{k: v for k, v in dataclasses.asdict(settings).items() if k != "texts"}}

        def serve(engine: LLM, salt: str) -> Measurement:
            return timed(engine, prompts, [params] * len(prompts))

        yield from self.measure(trial, functools.partial(serve, other), functools.partial(serve, llm))
        scored = [engine.generate(list(prompts), dataclasses.replace(params, logprobs=0)) for engine in (other, llm)]
        for text, (a, b) in enumerate(zip(*scored, strict=True)):
            yield {"metric": "text", "text": text, **compare(*(completion(o) for o in (a, b)))}

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes differ, the fraction of texts with other tokens; earliest, the first generated token, from 0, that
        differs in any text, absent if none does; bits, the fraction of log-probabilities with the same bits;
        mean_difference and max_difference of them; gain, seconds without / seconds with; and cpu_gain, the same of the
        processors' time."""
        sides = zip(of_side(measurements, "without"), of_side(measurements, "with"), strict=True)
        found = [m for m in measurements if m["metric"] == "text"]
        [length] = {m["output_tokens"] for m in measurements if m["metric"] == "setting"}
        count, ends = sum(m["agreed"] for m in found), [m["agreed"] for m in found if m["agreed"] < length]
        result = {**speeds(measurements), "differ": len(ends) / len(found)}
        result["cpu_gain"] = statistics.median(a["cpu_seconds"] / b["cpu_seconds"] for a, b in sides)
        if ends:
            result["earliest"] = min(ends)
        if count:
            result["bits"] = sum(m["same_bits"] for m in found) / count
            result["mean_difference"] = sum(m["mean_difference"] * m["agreed"] for m in found) / count
        result["max_difference"] = max(m["max_difference"] for m in found)
        return result

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        def small(value: float) -> str:
            return f"{value:.1e}" if value else "0"

        return [
            Column("differ", "texts that differ, %", percent(), exact=True),
            Column("earliest", "first other token", number(0), exact=True),
            Column("bits", "same bits, %", percent(), exact=True),
            Column("mean_difference", "mean difference", small, exact=True),
            Column("max_difference", "largest", small, exact=True),
            Column("gain", "time, ×", number(2)),
            Column("cpu_gain", "CPU time, ×", number(2)),
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        lengths = sorted({m["output_tokens"] for m in of_metric(rows, "setting")})
        return [
            "Each row compares an engine with another one that has the settings `against`, on the same prompts.",
            f"{' or '.join(map(str, lengths))} greedy tokens per text; first other token: the earliest in any text of "
            "a seed, counted from 0, mean over the seeds that have one.",
            "Same bits, mean, largest: of log-probabilities of generated tokens, as long as both sides have the same.",
            "Time, CPU time: that of the other engine / that of this one, in alternating runs.",
            *compilation_note(rows),
        ]

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws mean and largest difference of log-probabilities of each row, and the fraction of texts that have other
        tokens; a colour for each point of the grid."""
        measured = [r for r in rows if r.trials]
        if not measured:
            return
        axes = figure.subplots()
        labels = list(dict.fromkeys(r.label for r in measured))
        points = list(dict.fromkeys(_point(r) for r in measured))
        for row in measured:
            at = labels.index(row.label) + 0.5 * (points.index(_point(row)) + 0.5) / len(points) - 0.25
            colour, name = COLOURS[points.index(_point(row)) % len(COLOURS)], _point(row)
            largest = max(m["max_difference"] for m in of_metric([row], "text"))
            if not largest:
                axes.plot([LEAST_DRAWN], [at], marker="|", color=colour, label=name)
                continue
            mean = max(row.mean("mean_difference") or 0.0, LEAST_DRAWN)
            axes.plot([mean, largest], [at, at], marker="|", color=colour, label=name)
            if differ := row.mean("differ"):
                axes.annotate(f" {100 * differ:.1f} %", (largest, at), va="center", fontsize=5)
        axes.set_xscale("log")
        ticks = [LEAST_DRAWN * 100**power for power in range(5)]
        axes.set_xticks(ticks, ["none", *(f"{tick:.0e}" for tick in ticks[1:])])
        axes.minorticks_off()
        axes.margins(x=0.15)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set_xlabel("difference, mean to largest")
        if len(points) > 1:
            legend(figure, axes)


def _point(row: ResultRow) -> str:
    return ", ".join(words(row.point))


def completion(output: Any) -> tuple[list[int], np.ndarray]:
    """Returns the tokens of a request and their log-probabilities."""
    [completion] = output.check().outputs
    entries = zip(completion.logprobs, completion.token_ids, strict=True)
    return completion.token_ids, np.array([scores[token].logprob for scores, token in entries])


def compare(a: tuple[ArrayLike, np.ndarray], b: tuple[ArrayLike, np.ndarray]) -> Measurement:
    """Compares tokens and log-probabilities [T] that two sides have generated after one prompt.

    Returns:
      agreed: number of tokens before the first that differs. same_bits, mean_difference, max_difference: of the
      log-probabilities of these tokens.
    """
    others = np.flatnonzero(np.array(a[0]) != np.array(b[0]))
    agreed = int(others[0]) if len(others) else len(a[1])
    apart = np.abs(a[1][:agreed] - b[1][:agreed])
    mean, most = (float(f(apart)) if agreed else 0.0 for f in (np.mean, np.max))
    return {"agreed": agreed, "same_bits": int(np.sum(apart == 0)), "mean_difference": mean, "max_difference": most}
