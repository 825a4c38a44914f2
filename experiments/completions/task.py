"""Distinct greedy completions of one prompt under load.

Source: Horace He and Thinking Machines Lab (2025), "Defeating nondeterminism in LLM inference".

Requests with the same prompt are submitted together with others of random lengths, in random order: chunks and rows of
a step then differ from copy to copy. Completions of a batch-invariant engine are all the same.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ksana_jax.lab.runs import texts
from ksana_jax.lab.runs.asking import forced, run_warm
from ksana_jax.lab.runs.tasks.base import INPUT_TEXTS, BaseTask, TrialContext, int_field
from ksana_jax.lab.runs.tasks.results import (
    Column,
    Measurement,
    ResultRow,
    compilation_note,
    number,
    of_metric,
    percent,
)


@dataclasses.dataclass
class CompletionsSettings:
    """Fields of `settings` in the YAML file.

    prompt: text of the prompt that is completed again and again.
    num_completions: number of its completions.
    output_tokens: greedy tokens of each completion, regardless of EOS.
    num_others: number of other requests, submitted among them.
    other_tokens: maximum tokens of the prompt and of the output of another request; both are drawn from 1.
    texts: sources of the other prompts: files, folders, patterns or file.jsonl#field, see
      `lab.runs.text_files`; relative to the YAML file. Empty takes the held-out texts. The seed draws among
      them, and the order of all requests.
    """

    prompt: str = "Tell me about Richard Feynman"
    num_completions: int = int_field(1000)
    output_tokens: int = int_field(100)
    num_others: int = int_field(200, least=0)
    other_tokens: int = int_field(128)
    texts: list[str] = dataclasses.field(default_factory=list, metadata=INPUT_TEXTS)


class Completions(BaseTask):
    """The task of this study. See the module's docstring."""

    Settings = CompletionsSettings

    def num_tokens(self, config: Mapping[str, Any]) -> int:
        settings = CompletionsSettings(**config["settings"])
        return settings.num_completions * settings.output_tokens + settings.num_others * settings.other_tokens

    def check(self, config: Mapping[str, Any]) -> None:
        settings = CompletionsSettings(**config["settings"])
        cut = texts.ExcerptSpec(settings.other_tokens, setting="settings.other_tokens")
        texts.check_config(config, settings.num_others, cut, "settings.num_others")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings, llm = CompletionsSettings(**trial.config["settings"]), trial.llm
        rng = np.random.default_rng(trial.seed)
        drawn = texts.prompts_for(llm, settings.texts, settings.num_others, settings.other_tokens, trial.seed)
        sizes = rng.integers(1, settings.other_tokens, (settings.num_others, 2), endpoint=True).tolist()
        requests: list[tuple[Any, Any]] = [
            ({"prompt_token_ids": ids[:size]}, forced(count, temperature=0.0))
            for ids, (size, count) in zip(drawn, sizes, strict=True)
        ]
        requests += [(settings.prompt, forced(settings.output_tokens, temperature=0.0))] * settings.num_completions
        order = rng.permutation(len(requests)).tolist()
        outputs, seconds, compiled = run_warm(llm, lambda: llm.generate(*map(list, zip(*[requests[i] for i in order]))))
        found = [tuple(o.check().outputs[0].token_ids) for i, o in zip(order, outputs, strict=True) if i >= len(drawn)]
        counts = Counter(found).most_common()
        usual = np.array(counts[0][0])
        for tokens, count in counts:
            parted = np.flatnonzero(usual != np.array(tokens))
            yield {"metric": "completion", "count": count, "parts_at": int(parted[0]) if len(parted) else None}
        total = sum(len(o.outputs[0].token_ids) for o in outputs)
        yield {"metric": "speed", "num_output_tokens": total, "seconds": seconds, "compiled_while_timed": compiled}

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes distinct, the number of different completions; usual, the fraction that are the most frequent one;
        earliest, the first token, from 0, at which any parts from it, absent if none does; and tokens_per_s."""
        found = [m for m in measurements if m["metric"] == "completion"]
        (speed,) = [m for m in measurements if m["metric"] == "speed"]
        counts, parts = [m["count"] for m in found], [m["parts_at"] for m in found if m["parts_at"] is not None]
        result = {"distinct": len(found), "usual": max(counts) / sum(counts)}
        if parts:
            result["earliest"] = min(parts)
        result["compiled_while_timed"] = speed["compiled_while_timed"]
        return result | {"tokens_per_s": speed["num_output_tokens"] / speed["seconds"]}

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("distinct", "distinct completions", number(0), "min", exact=True),
            Column("usual", "most frequent, %", percent(), exact=True),
            Column("earliest", "first other token", number(0), exact=True),
            Column("tokens_per_s", "output tokens/s", number(0), "max"),
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        totals = {sum(m["count"] for m in of_metric([r], "completion")) // len(r.trials) for r in rows if r.trials}
        return [
            f"{' or '.join(f'{t:,}' for t in sorted(totals))} greedy completions of one prompt for each seed, among "
            "other requests of random lengths in random order.",
            "First other token: the earliest at which a completion parts from the most frequent one, counted from 0, "
            "mean over the seeds that have one.",
            *compilation_note(rows),
        ]
