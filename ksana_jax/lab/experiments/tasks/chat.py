"""Gain from a prefix cache in a chat over one document: each turn sends the whole chat so far, and a question.

The trial's engine is the side "with". The side "without" is a second engine with the same weights and settings, but
without caching, so that it computes every turn from the start. Where rows evict, a turn starts from the snapshot that
the turn before has left (`kv.snapshots`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.experiments import texts
from ksana_jax.lab.experiments.asking import forced
from ksana_jax.lab.experiments.tasks.base import INPUT_TEXTS, TrialContext, int_field
from ksana_jax.lab.experiments.tasks.paired import PairedTask, check_no_shared_folder, other_engine, speeds, timed_work
from ksana_jax.lab.experiments.tasks.prefix_cache import WITHOUT_CACHE
from ksana_jax.lab.experiments.tasks.results import (
    Column,
    Measurement,
    ResultRow,
    compilation_note,
    milliseconds,
    number,
    of_metric,
)

if TYPE_CHECKING:
    from ksana_jax import LLM
    from ksana_jax.core.outputs import RequestOutput

_QUESTIONS = ("What is this about?", "Give an example.", "Why?", "Is there another way?")


@dataclasses.dataclass
class ChatSettings:
    """Fields of `settings` in a chat experiment.

    texts: sources of the document: files, folders, patterns or file.jsonl#field, see `lab.experiments.text_files`;
      relative to the YAML file. Empty takes the held-out texts. The seed draws an excerpt.
    prompt_tokens: tokens of the document, BOS included.
    questions: texts of the turns, one each.
    output_tokens: tokens of each answer, greedy, regardless of EOS.
    num_pairs: timed runs of each side.
    """

    texts: list[str] = dataclasses.field(default_factory=list, metadata=INPUT_TEXTS)
    prompt_tokens: int = int_field(1024)
    questions: list[str] = dataclasses.field(default_factory=lambda: list(_QUESTIONS))
    output_tokens: int = int_field(32)
    num_pairs: int = int_field(1)


class Chat(PairedTask):
    """The task `chat`. See the module's docstring."""

    Settings = ChatSettings

    def max_model_len(self, settings: ChatSettings) -> int:
        # A tokenizer makes at most one token of a byte.
        asked = sum(len(question.encode()) for question in settings.questions)
        return settings.prompt_tokens + asked + len(settings.questions) * settings.output_tokens

    def check(self, config: Mapping[str, Any]) -> None:
        settings = ChatSettings(**config["settings"])
        if not config["engine"]["enable_prefix_caching"]:
            raise ConfigError("engine.enable_prefix_caching is false, must be true: there is nothing to compare")
        if not settings.questions or not all(isinstance(q, str) and q for q in settings.questions):
            raise ConfigError(f"settings.questions is {settings.questions!r:.80}, must be a list of at least one text")
        check_no_shared_folder(config)
        texts.check_config(config, 1, texts.Cut(settings.prompt_tokens), "the document of settings.texts")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings, llm = ChatSettings(**trial.config["settings"]), trial.llm
        plain, tokenizer = other_engine(trial, WITHOUT_CACHE), llm.get_tokenizer()
        [document] = texts.prompts_for(llm, settings.texts, 1, settings.prompt_tokens, trial.seed)
        questions = [tokenizer.encode(question, add_special_tokens=False) for question in settings.questions]

        def serve(engine: LLM, salt: str) -> Measurement:
            turns: list[RequestOutput] = []

            def talk() -> list[RequestOutput]:
                text = list(document)
                for question in questions:
                    text += question
                    prompt = {"prompt_token_ids": text, "cache_salt": salt}
                    turns.extend(engine.generate(prompt, forced(settings.output_tokens, temperature=0.0)))
                    text += turns[-1].outputs[0].token_ids
                return turns

            found = timed_work(engine, talk)
            answers = [turn.outputs[0].token_ids for turn in turns]
            found["prompt_tokens"] = [len(turn.prompt_token_ids) for turn in turns]
            found["cached_tokens"] = [turn.num_cached_tokens for turn in turns]
            found["turn_ttft_s"] = [turn.metrics.ttft_s for turn in turns]
            return {**found, "answers": hashlib.sha256(repr(answers).encode()).hexdigest()[:16]}

        yield from self.measure(trial, functools.partial(serve, plain), functools.partial(serve, llm))

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes gain, seconds without / seconds with; for each side seconds, computed prompt tokens, and
        later_ttft_s, the mean over all turns but the first; and same, 1 if all answers are equal."""
        runs = [m for m in measurements if m["metric"] == "run"]
        result = speeds(measurements)
        for side in ("without", "with"):
            of_side = [m for m in runs if m["side"] == side]
            result[f"seconds_{side}"] = sum(m["seconds"] for m in of_side) / len(of_side)
            if later := [seconds for m in of_side for seconds in m["turn_ttft_s"][1:]]:
                result[f"later_ttft_s_{side}"] = sum(later) / len(later)
            result[f"prompt_tokens_{side}"] = sum(of_side[0]["prompt_tokens"]) - sum(of_side[0]["cached_tokens"])
        return result | {"same": float(len({m["answers"] for m in runs}) == 1)}

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("prompt_tokens_without", "prompt tokens without", number(0), exact=True),
            Column("prompt_tokens_with", "prompt tokens with", number(0), exact=True),
            Column("seconds_without", "seconds without", number(1)),
            Column("seconds_with", "seconds with", number(1)),
            Column("gain", "gain, ×", number(2), "max"),
            Column("later_ttft_s_without", "TTFT without, ms", milliseconds(0)),
            Column("later_ttft_s_with", "TTFT with, ms", milliseconds(0)),
            Column("same", "same answers", number(0), exact=True),
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        lengths = [m["prompt_tokens"] for m in of_metric(rows, "run")]
        turns = {f"{len(some)} turns, prompts of {some[0]:,} to {some[-1]:,} tokens" for some in lengths}
        return [
            *(f"{said}. Prompt tokens: those that were computed, of all turns." for said in sorted(turns)),
            "Gain: seconds of the whole chat without / with, in alternating runs, median over the pairs of a seed.",
            "TTFT: mean over all turns but the first. Same answers: 1 if all tokens of both sides are equal.",
            *compilation_note(rows),
        ]

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        measured = [r for r in rows if r.trials]
        said = "; ".join(
            f"{r.name}: {r.mean('prompt_tokens_with') or 0:,.0f} of {r.mean('prompt_tokens_without') or 0:,.0f} prompt "
            f"tokens computed, {r.mean('gain') or 0:.1f} times as fast, "
            f"{'the same' if r.mean('same') == 1 else 'other'} answers"
            for r in measured
        )
        return f"{said}." if said else ""
