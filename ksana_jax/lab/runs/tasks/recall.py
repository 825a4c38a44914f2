"""Recall: how often a model answers questions about its prompt, by the place of the answer and the prompt's length.

Texts are generated (`ksana_jax.lab.recall`), so nothing is downloaded. An answer is correct if greedy decoding gives
exactly its tokens. Small models may answer nothing correctly, so log-probability and rank of the answer's tokens are
measured as well, with the answer at the end of the prompt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.recall import Example, check_example, make_example
from ksana_jax.lab.runs import significance
from ksana_jax.lab.runs.asking import forced, token_scores
from ksana_jax.lab.runs.models import tokenizer_of
from ksana_jax.lab.runs.tasks import kept, recall_figure
from ksana_jax.lab.runs.tasks.base import AskingTask, TrialContext, asked_of, int_field
from ksana_jax.lab.runs.tasks.compression import best_and_full, kv_said
from ksana_jax.lab.runs.tasks.results import Column, Measurement, Part, ResultRow, kib, number, of_metric, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ksana_jax import LLM
    from ksana_jax.core.outputs import CompletionOutput, Logprob


@dataclasses.dataclass
class RecallSettings:
    """Fields of `settings` in a recall experiment.

    kind: passkey, needle, key_value, multi_query, variable_tracking, stream_eval, or "package.module:function" of your
      own; see `ksana_jax.lab.recall.kinds`.
    num_tokens: maximum tokens of a prompt and its answer, BOS included; filler fills them.
    num_examples: number of examples, each asked at every value of `sweep`.
    sweep: {option: [values]}, one option of the kind, such as {depth: [0, 0.5, 1]} or {distance: [5, 10, 20]}; each
      value has a column. Empty measures without one.
    options: {option: value}, other options of the kind.
    ask: "with" gives text and question together; "after" compresses the KV of the text by `kv_eviction` before the
      question is read, as kvpress does.
    """

    kind: str = "needle"
    num_tokens: int = int_field(256)
    num_examples: int = int_field(20)
    sweep: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    ask: Literal["with", "after"] = "with"

    @property
    def swept(self) -> tuple[str, list[Any]]:
        """The swept option and its values; ("", [None]) without one."""
        return next(iter(self.sweep.items()), ("", [None]))

    def options_at(self, value: Any) -> dict[str, Any]:
        """Returns the kind's options at a value of the swept one."""
        return {**self.options, **({self.swept[0]: value} if self.sweep else {})}


class Recall(AskingTask):
    """The task `recall`. See the module's docstring."""

    Settings = RecallSettings

    def max_model_len(self, settings: RecallSettings) -> int:
        return settings.num_tokens + 1

    def num_tokens(self, config: Mapping[str, Any]) -> int:
        settings = RecallSettings(**config["settings"])
        return settings.num_examples * len(settings.swept[1]) * settings.num_tokens * 2  # asked, and scored

    def check(self, config: Mapping[str, Any]) -> None:
        settings = RecallSettings(**config["settings"])
        if len(settings.sweep) > 1:
            raise ConfigError(f"settings.sweep has {len(settings.sweep)} options, must have at most one")
        option, values = settings.swept
        if not isinstance(values, list) or not values or len(set(map(repr, values))) < len(values):
            raise ConfigError(f"settings.sweep.{option} is {values!r:.60}, must be a list of distinct values")
        if option in settings.options:
            raise ConfigError(f"settings.options and settings.sweep both set {option!r}")
        tokenizer = tokenizer_of(config["model"])
        for value in values:
            check_example(
                settings.kind,
                tokenizer and tokenizer.encode,
                num_tokens=settings.num_tokens,
                **settings.options_at(value),
            )

    def num_samples(self, config: Mapping[str, Any]) -> int:
        settings = RecallSettings(**config["settings"])
        return settings.num_examples * len(settings.swept[1])

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings, llm = RecallSettings(**trial.config["settings"]), trial.llm
        option, values = settings.swept
        masks: dict[str, np.ndarray | None] = {}
        for done, value in enumerate(values, start=1):
            examples = _examples(settings, llm, trial.seed, value)
            for example, given, scores in zip(
                examples, _answers(llm, examples, settings.ask), _scores(llm, examples, settings.ask), strict=True
            ):
                masks[_digest(example)] = given.kept_tokens
                yield {
                    "metric": "answer",
                    "option": option,
                    "value": value,
                    "digest": _digest(example),
                    "correct": list(given.token_ids) == example.answer_ids,
                    "logprob": sum(score.logprob for score in scores),
                    "ranks": [score.rank for score in scores],
                    "num_prompt_tokens": len(example.prompt_ids),
                    "distance": example.distance,
                    "chance": example.chance,
                }
            trial.progress(done / (len(values) + 1))
        yield from kept.measured(trial, masks)
        yield {"metric": "kv", **_kv(llm, _examples(settings, llm, trial.seed, values[-1])[0], settings.ask)}

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes accuracy, log-probability per answer token, rank and distance, over all answers and per value."""
        answers = [m for m in measurements if m["metric"] == "answer"]
        values = [value for value in {repr(m["value"]): m["value"] for m in answers}.values() if value is not None]
        result = _means(answers, "")
        for value in values:
            result |= _means([m for m in answers if m["value"] == value], f"_{value}")
        (kv,) = [m for m in measurements if m["metric"] == "kv"]
        # Earlier versions recorded the maximum between steps, and None of a request that was one step.
        held = kv["held_kv_bytes"] if "held_kv_bytes" in kv else kv["live_kv_bytes"]
        return result | kept.summarised(measurements) | ({} if held is None else {"live_kv_bytes": held})

    def parts(self, measurements: Sequence[Measurement]) -> dict[str, dict[Hashable, Part]]:
        """Returns accuracy, log-probability and rank on each question."""
        parts: dict[str, dict[Hashable, Part]] = defaultdict(dict)
        for m in (m for m in measurements if m["metric"] == "answer"):
            tokens = len(m["ranks"])
            for suffix in ("", *([] if m["value"] is None else [f"_{m['value']}"])):
                parts[f"accuracy{suffix}"][m["digest"]] = Part(float(m["correct"]))
                parts[f"logprob{suffix}"][m["digest"]] = Part(m["logprob"] / tokens, tokens)
                parts[f"rank{suffix}"][m["digest"]] = Part(float(np.mean(m["ranks"])), tokens)
        return dict(parts)

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        earlier = any("live_kv_bytes" in m for m in of_metric(rows, "kv"))
        held = "maximum held between steps, as earlier versions recorded it" if earlier else "held at its end"
        option, values = recall_figure.swept(rows)
        swept = [Column(f"accuracy_{value}", f"{option} {value}, %", _percent, "max") for value in values]
        return [
            *swept,
            Column("accuracy", "all, %" if swept else "correct, %", _percent, "max", change="change, points"),
            Column("chance", "chance, %", _chance, exact=True, note=_CHANCE),
            Column("logprob", "nats per answer token", number(2), "max", note=_NATS),
            Column("rank", "rank", number(1), "min"),
            Column("live_kv_bytes", "live KV, KiB", kib, "min", exact=True, note=f"Live KV: of one request, {held}."),
            *kept.columns(rows),
        ]

    def headline(self, rows: Sequence[ResultRow]) -> Column | None:
        return next(column for column in self.columns(rows) if column.key == "accuracy")

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        said = ["Correct: greedy decoding gives exactly the answer's tokens."]
        option, values = recall_figure.swept(rows)
        if values and len({row.point.get("settings.num_tokens") for row in rows}) == 1:
            back = [
                f"{d:,.0f}" for v in values if (d := next(filter(None, (r.mean(f"distance_{v}") for r in rows)), None))
            ]
            said.append(f"Tokens from the fact to the answer, by {option}: {', '.join(back)}.")
        return said

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        """Compares the best compressed row with the full cache; without one of them, it names the best row."""
        measured = [row for row in rows if row.mean("accuracy") is not None]
        if not any(row.mean("accuracy") for row in measured):
            return "No row answers anything correctly." if measured else ""

        def rank(row: ResultRow) -> tuple[bool, float, float]:
            """Orders rows from the best; among rows displayed equally, the one with the least KV is better."""
            value = row.mean("accuracy") or 0.0
            return math.isnan(value), -round(value, 2), row.mean("live_kv_bytes") or 0.0

        best, full = best_and_full(measured, rank)
        shown = [
            f"{row.name!r}: {_percent(row.mean('accuracy') or 0.0)} % of answers are correct"
            for row in (full, best)
            if row
        ]
        if full is not None and (caveat := significance.caveat(best, full, "accuracy")):
            shown[1] += f" ({caveat})"
        chance = best.mean("chance") or 0.0
        above = "chance is" if (best.mean("accuracy") or 0.0) > chance else "it does not exceed chance,"
        return f"{'; '.join(shown)}{kv_said(best, full)}; {above} {_chance(chance)} %."

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        if not recall_figure.draw(figure, [row for row in rows if row.trials]):
            super().draw(figure, rows)


def _examples(settings: RecallSettings, llm: LLM, seed: int, value: Any) -> list[Example]:
    if llm.tokenizer is None:
        raise ConfigError("recall texts need a tokenizer, which the model does not have")
    encode, options = llm.tokenizer.encode, settings.options_at(value)
    # Training with recall examples draws seeds below 2^32.
    seeds = range(first := (seed + 1) << 32, first + settings.num_examples)
    return [make_example(settings.kind, encode, num_tokens=settings.num_tokens, seed=s, **options) for s in seeds]


def _digest(example: Example) -> str:
    return hashlib.sha256(example.text.encode()).hexdigest()[:12]


def _answers(llm: LLM, examples: Sequence[Example], ask: str) -> list[CompletionOutput]:
    """Returns the greedy completion of each example, of as many tokens as its answer has."""
    asked = [asked_of(e.prompt_ids, e.num_question, ask) for e in examples]
    counts = [len(e.answer_ids) for e in examples]
    outputs = llm.generate(asked, [forced(count, min_tokens=count, temperature=0.0) for count in counts])
    return [output.check().outputs[0] for output in outputs]


def _scores(llm: LLM, examples: Sequence[Example], ask: str) -> list[list[Logprob]]:
    """Returns the `Logprob` of each answer token of each example."""
    # The scored tokens follow the eviction from the text, or from text and question.
    asked = [len(e.answer_ids) + (e.num_question if ask == "after" else 0) for e in examples]
    prompts = [asked_of(e.prompt_ids + e.answer_ids, n, "after") for e, n in zip(examples, asked, strict=True)]
    return [scores[-len(e.answer_ids) :] for e, scores in zip(examples, token_scores(llm, prompts), strict=True)]


def _kv(llm: LLM, example: Example, ask: str) -> dict[str, Any]:
    """Measures the blocks of one request at its end."""
    llm.clear_records()
    _answers(llm, [example], ask)
    return {"held_kv_bytes": int(llm.records[-1].live_blocks) * llm.block_bytes}


def _means(answers: Sequence[Measurement], suffix: str) -> dict[str, float]:
    ranks = [rank for m in answers for rank in m["ranks"]]
    return {
        f"accuracy{suffix}": statistics.fmean(m["correct"] for m in answers),
        f"logprob{suffix}": sum(m["logprob"] for m in answers) / len(ranks),
        f"rank{suffix}": float(np.mean(ranks)),
        f"distance{suffix}": statistics.fmean(m["distance"] for m in answers),
        f"chance{suffix}": statistics.fmean(m["chance"] for m in answers),
    }


def _chance(value: float) -> str:
    return f"{100 * value:.3f}".rstrip("0").rstrip(".")


_percent = percent(0)
_CHANCE = "Chance: a guess among the values in the prompt or, if it has only one, among all values."
_NATS = (
    "Nats and rank: log-probability and rank of each answer token, given the prompt and the answer so far; greedy "
    "decoding takes rank 1."
)
