"""RULER: retrieval, variable tracking and aggregation in long texts, by RULER's own tasks and score.

Prompts are generated (`ksana_jax.lab.recall.ruler`); some tasks hide their needles in a natural text, which is given.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.recall.question import QuestionSpec
from ksana_jax.lab.recall.ruler import MAX_TOKENS, RULER_TASKS, RulerPrompt, check_prompt, make_prompt, score
from ksana_jax.lab.runs.asking import forced
from ksana_jax.lab.runs.models import tokenizer_of
from ksana_jax.lab.runs.significance import wilson
from ksana_jax.lab.runs.tasks import kept
from ksana_jax.lab.runs.tasks.base import INPUT_FILES, AskingTask, TrialContext, asked_of, int_field
from ksana_jax.lab.runs.tasks.results import Column, Measurement, Part, ResultRow, kib, percent
from ksana_jax.lab.runs.text_files import candidates, digest

if TYPE_CHECKING:
    import numpy as np

    from ksana_jax import LLM
    from ksana_jax.core.outputs import CompletionOutput

_HAYSTACK = "settings.haystack"
_WORD_CHARS = 64  # of each token's share of a haystack file; white space and words of more would be cut off
_WITHOUT_TEXT = [name for name, task in RULER_TASKS.items() if not task.reads_text]


@dataclasses.dataclass
class RulerSettings:
    """Fields of `settings` in a ruler experiment.

    tasks: niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue, niah_multiquery, vt, cwe, fwe; each has a column.
      The default leaves out those that need a haystack.
    num_tokens: maximum tokens of a prompt, chat template included, and its answer; filler fills them. An answer has up
      to 128 tokens (niah), 30 (vt), 120 (cwe) or 50 (fwe).
    num_examples: number of prompts of each task.
    haystack: natural texts, named as in `lab.runs.text_files` ([essays] after `ksana fetch essays`), whose
      beginning is the filler of niah_single_2, niah_single_3, niah_multikey_1, niah_multivalue and niah_multiquery.
    chat: whether prompts have the form of the model's chat template; null uses one if there is one.
    ask: "with" gives text and question together; "after" compresses the KV of the text by `kv_eviction` before the
      question is read, as kvpress does.
    depth: place of the requested fact, from 0 (beginning) to 1 (end), in niah tasks and vt; null draws one.
    """

    tasks: list[str] = dataclasses.field(default_factory=lambda: list(_WITHOUT_TEXT))
    num_tokens: int = int_field(1024, 1, MAX_TOKENS)
    num_examples: int = int_field(10)
    haystack: list[str] = dataclasses.field(default_factory=list, metadata=INPUT_FILES)
    chat: bool | None = None
    ask: Literal["with", "after"] = "with"
    depth: float | None = None


class Ruler(AskingTask):
    """The task `ruler`. See the module's docstring."""

    Settings = RulerSettings

    def max_model_len(self, settings: RulerSettings) -> int:
        return settings.num_tokens

    def num_tokens(self, config: Mapping[str, Any]) -> int:
        settings = RulerSettings(**config["settings"])
        return len(settings.tasks) * settings.num_examples * settings.num_tokens

    def num_samples(self, config: Mapping[str, Any]) -> int:
        return len(config["settings"]["tasks"]) * config["settings"]["num_examples"]

    def inputs(self, settings: RulerSettings) -> dict[str, str]:
        return {"haystack": digest(settings.haystack, _HAYSTACK)} if _reading(settings) else {}

    def check(self, config: Mapping[str, Any]) -> None:
        settings = RulerSettings(**config["settings"])
        if not settings.tasks or len(set(map(repr, settings.tasks))) < len(settings.tasks):
            raise ConfigError(f"settings.tasks is {settings.tasks!r:.80}, must be a list of distinct tasks")
        checks.require(*(checks.one_of("settings.tasks", t, RULER_TASKS) for t in settings.tasks), error=ConfigError)
        if (reading := _reading(settings)) and not settings.haystack:
            raise ConfigError(
                f"settings.haystack is empty, {reading[0]} needs a natural text: settings.haystack=[FOLDER] takes the "
                "text files of a folder, settings.haystack=[essays] what `ksana fetch essays` has stored"
            )
        given = _given(settings)
        if (tokenizer := tokenizer_of(config["model"])) is not None:
            for task in settings.tasks:
                check_prompt(task, tokenizer, given, chat=settings.chat)

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings, llm = RulerSettings(**trial.config["settings"]), trial.llm
        if llm.tokenizer is None:
            raise ConfigError("RULER's texts need a tokenizer, which the model does not have")
        given, prompts = _given(settings), []
        masks: dict[str, np.ndarray | None] = {}
        for done, task in enumerate(settings.tasks, start=1):
            seeds = range(first := trial.seed << 32, first + settings.num_examples)
            prompts = [make_prompt(task, llm.tokenizer, given, seed=seed, chat=settings.chat) for seed in seeds]
            for prompt, answer in zip(prompts, _answers(llm, prompts, settings.ask), strict=True):
                name = hashlib.sha256(prompt.text.encode()).hexdigest()[:12]
                masks[name] = answer.kept_tokens
                yield {
                    "metric": "answer",
                    "task": task,
                    "digest": name,
                    "score": score(answer.text, prompt.answers),
                    "answer": answer.text,
                    "expected": list(prompt.answers),
                    "num_prompt_tokens": len(prompt.ids),
                }
            trial.progress(done / (len(settings.tasks) + 1))
        yield from kept.measured(trial, masks)
        yield {"metric": "kv", "held_kv_bytes": _held_bytes(llm, prompts[0], settings.ask)}

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes the mean score of each task, 0 to 1, the mean over tasks, and live_kv_bytes."""
        scores = {f"score_{task}": statistics.fmean(found) for task, found in _scores([measurements]).items()}
        (kv,) = [m for m in measurements if m["metric"] == "kv"]
        scores |= {"score": statistics.fmean(scores.values()), "live_kv_bytes": kv["held_kv_bytes"]}
        return scores | kept.summarised(measurements)

    def parts(self, measurements: Sequence[Measurement]) -> dict[str, dict[Hashable, Part]]:
        """Returns the score of each prompt; in the mean over all, tasks weigh the same."""
        answers = [m for m in measurements if m["metric"] == "answer"]
        counts = Counter(m["task"] for m in answers)
        parts: dict[str, dict[Hashable, Part]] = defaultdict(dict)
        for m in answers:
            parts["score"][m["digest"]] = Part(m["score"], 1 / counts[m["task"]])
            parts[f"score_{m['task']}"][m["digest"]] = Part(m["score"])
        return dict(parts)

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        tasks = list(dict.fromkeys(task for row in rows for task in _scores(row.trials)))
        return [
            Column("score", "all, %" if len(tasks) > 1 else "score, %", _percent, "max", change="change, points"),
            *(Column(f"score_{task}", f"{task}, %", _percent, "max") for task in tasks if len(tasks) > 1),
            Column("live_kv_bytes", "live KV, KiB", kib, "min", exact=True, note=_LIVE),
            *kept.columns(rows),
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        found = {(statistics.fmean(s), len(s)) for row in rows for s in _scores(row.trials).values()}
        return [
            "Score: the expected texts that greedy decoding gives, in upper or lower case, of all expected "
            "(RULER's string_match_all); all: mean over tasks.",
            *[f"Wilson's 95 % interval of a score: {'; '.join(_interval_said(*one) for one in sorted(found))}."]
            * bool(found),
        ]


def _interval_said(score: float, count: int) -> str:
    low, high = wilson(score, count)
    return f"{_percent(score)} is {_percent(low)} to {_percent(high)} (n = {count})"


def _reading(settings: RulerSettings) -> list[str]:
    """Returns the tasks that read a natural text."""
    return [task for task in settings.tasks if RULER_TASKS[task].reads_text]


def _given(settings: RulerSettings) -> QuestionSpec:
    """Returns the prompts' common part, with the first num_tokens words of the haystack: no more are needed."""
    words: list[str] = []
    if _reading(settings):
        for _, text in candidates(settings.haystack, _HAYSTACK):
            if len(words) >= settings.num_tokens:
                break
            words += text[: _WORD_CHARS * settings.num_tokens].split()
        if not words:
            raise ConfigError(f"settings.haystack: {', '.join(settings.haystack):.300}: no words in these files")
    return QuestionSpec(settings.num_tokens, words[: settings.num_tokens], settings.depth)


def _answers(llm: LLM, prompts: Sequence[RulerPrompt], ask: str) -> list[CompletionOutput]:
    from ksana_jax import SamplingParams

    params = [SamplingParams(max_tokens=prompt.num_answer_tokens, temperature=0.0) for prompt in prompts]
    asked = [asked_of(prompt.ids, prompt.num_question, ask) for prompt in prompts]
    outputs = llm.generate(asked, params)
    return [output.check().outputs[0] for output in outputs]


def _held_bytes(llm: LLM, prompt: RulerPrompt, ask: str) -> int:
    llm.clear_records()
    params = forced(8, min_tokens=8, temperature=0.0)
    (output,) = llm.generate([asked_of(prompt.ids, prompt.num_question, ask)], params)
    output.check()
    return int(llm.records[-1].live_blocks) * llm.block_bytes


def _scores(trials: Sequence[Sequence[Measurement]]) -> dict[str, list[float]]:
    """Returns the scores of distinct prompts by task."""
    found: dict[str, dict[str, float]] = {}
    for m in (m for trial in trials for m in trial if m["metric"] == "answer"):
        found.setdefault(m["task"], {}).setdefault(m["digest"], m["score"])
    return {task: list(scores.values()) for task, scores in found.items()}


_percent = percent()
_LIVE = "Live KV: of one request, held at the end of its prompt and 8 tokens."
