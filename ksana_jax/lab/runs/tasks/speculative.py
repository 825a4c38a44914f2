"""Gain from speculative decoding: the same requests served with and without drafts, in alternating runs.

The trial's engine is the side "without". The side "with" is a second engine with the same weights and settings, plus
`settings.speculative_config`. Every run has its own salt, so tries learn only from the requests of their run, and from
earlier ones that the settings allow.

Source of the formula: Leviathan et al., arXiv:2211.17192, section 3.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs import texts
from ksana_jax.lab.runs.asking import forced, token_scores
from ksana_jax.lab.runs.models import fingerprint
from ksana_jax.lab.runs.tasks.base import INPUT_TEXTS, TrialContext, int_field
from ksana_jax.lab.runs.tasks.paired import PairedTask, Side, of_side, twin, with_changes
from ksana_jax.lab.runs.tasks.results import (
    Column,
    Measurement,
    ResultRow,
    compilation_note,
    number,
    percent,
)
from ksana_jax.lab.runs.tasks.speculative_prompts import PROMPTS
from ksana_jax.scheduler.speculative import read_speculative

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ksana_jax import LLM


@dataclasses.dataclass
class SpeculativeSettings:
    """Fields of `settings` in a speculative experiment.

    speculative_config: of the side "with"; see docs/use/speculative.md.
    prompts: "free" continues a text, "edit" begins a text again, "chat" asks about a text in the model's chat template,
      "shared" has the same text in many prompts.
    texts: sources of the prompts, see `lab.runs.text_files`; empty takes the embedded model's held-out files.
    prompt_tokens, output_tokens: of each request; end-of-text tokens do not end it.
    temperature: of all requests.
    batch_size: requests that arrive together.
    num_batches: number of batches; each begins when the one before is done.
    traffic: other requests, which are served before and not timed: tries know their outputs.
    preloaded: other requests, whose outputs tries are given without serving them. Methods with tries only.
    num_pairs: timed runs of each side.
    """

    speculative_config: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"method": "ngram", "num_speculative_tokens": 4}
    )
    prompts: str = "free"
    texts: list[str] = dataclasses.field(default_factory=list, metadata=INPUT_TEXTS)
    prompt_tokens: int = int_field(128, 32)
    output_tokens: int = int_field(96)
    temperature: float = 0.0
    batch_size: int = int_field(1)
    num_batches: int = int_field(4)
    traffic: int = int_field(0, 0)
    preloaded: int = int_field(0, 0)
    num_pairs: int = int_field(1)

    @property
    def num_requests(self) -> int:
        return self.batch_size * self.num_batches


class Speculative(PairedTask):
    """The task `speculative`. See the module's docstring."""

    Settings = SpeculativeSettings

    def inputs(self, settings: SpeculativeSettings) -> dict[str, str]:
        found = super().inputs(settings)
        if (model := settings.speculative_config.get("model")) is not None:
            found |= fingerprint(model, key="draft_model")
        return found

    def check(self, config: Mapping[str, Any]) -> None:
        settings = SpeculativeSettings(**config["settings"])
        checks.require(checks.one_of("settings.prompts", settings.prompts, tuple(PROMPTS)), error=ConfigError)
        read_speculative(settings.speculative_config)
        if config["engine"]["speculative_config"] is not None:
            raise ConfigError("engine.speculative_config is set, must be null: settings.speculative_config is compared")
        if (most := config["engine"]["max_num_seqs"]) < settings.batch_size:
            raise ConfigError(f"settings.batch_size is {settings.batch_size}, engine.max_num_seqs is {most}")
        needed = settings.num_requests + settings.traffic + settings.preloaded
        texts.check_config(config, needed, texts.ExcerptSpec(settings.prompt_tokens), "the number of requests")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings, plain = SpeculativeSettings(**trial.config["settings"]), trial.llm
        drafting = with_drafts(plain, settings.speculative_config, _params(settings, 1, trial.seed))
        asked, known, preloaded = _requests(settings, plain, trial.seed)
        outputs = _outputs(plain, preloaded, settings, trial.seed) if preloaded else []
        written: dict[Side, list[list[int]]] = {}

        def serve(llm: LLM, salt: str) -> Measurement:
            if llm is drafting:
                for text in outputs:
                    llm.engine.scheduler.speculation.proposer.learn(np.array(text, np.int32), salt)  # pyright: ignore
                if known:
                    _outputs(llm, known, settings, trial.seed, salt)
            measured, written["with" if llm is drafting else "without"] = _timed(llm, asked, settings, trial.seed, salt)
            return measured

        runs = []
        for measurement in self.measure(trial, functools.partial(serve, plain), functools.partial(serve, drafting)):
            runs.append(measurement)
            yield measurement
        if not _lossless(settings):
            for side, outputs in written.items():
                yield {"metric": "quality", "side": side, "nll": _nll(plain, asked, outputs)}
        elif plain.config.numerics == "invariant" and (same := _same(runs)) is not None and same < 1:
            raise AssertionError(f"{1 - same:.1%} of the outputs differ from those without speculation")

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes gain, seconds without / seconds with, median over pairs, gain_least and gain_most among them;
        acceptance_rate, acceptance_length, per_forward; alpha, the accepted fraction of the draft tokens that were not
        behind a rejected one; drafting, seconds of drafts as a fraction of a plain step's; formula, the gain if
        verification took as long as a plain step; same, the fraction of texts equal to those without speculation;
        nll_*, nats per token of the texts of a side under the target, of methods that may change texts."""
        without, with_ = of_side(measurements, "without"), of_side(measurements, "with")
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(without, with_, strict=True)]
        result = {"gain": statistics.median(ratios), "gain_least": min(ratios), "gain_most": max(ratios)}
        for side, runs in (("without", without), ("with", with_)):
            result[f"tokens_per_s_{side}"] = statistics.median(m["num_output_tokens"] / m["seconds"] for m in runs)
        totals = {key: sum(m[key] for m in with_) for key in _COUNTS}
        result |= _acceptance(totals, np.sum([m["accepted_per_pos"] for m in with_], axis=0).tolist())
        step_s = statistics.median(m["seconds"] / m["num_steps"] for m in without)
        result["drafting"] = totals["proposer_s"] / totals["num_steps"] / step_s
        result["formula"] = result["per_forward"] / (1 + result["drafting"])
        if (same := _same(measurements)) is not None:
            result["same"] = same
        result |= {f"nll_{m['side']}": m["nll"] for m in measurements if m["metric"] == "quality"}
        result["compiled_while_timed"] = sum(m["compiled_while_timed"] for m in (*without, *with_))
        return result

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("acceptance_rate", "accepted, %", percent()),
            Column("acceptance_length", "acceptance length", number(2)),
            Column("per_forward", "tokens/forward", number(2)),
            Column("drafting", "drafting, % of a step", percent()),
            Column("tokens_per_s_without", "tokens/s off", number(0)),
            Column("tokens_per_s_with", "tokens/s on", number(0)),
            Column("formula", "formula, ×", number(2)),
            Column("gain", "speed-up, ×", number(2), "max"),
            Column("gain_least", "least", number(2)),
            Column("gain_most", "most", number(2)),
            Column("same", "same texts, %", percent(), exact=True),
            *(
                Column(f"nll_{side}", f"nats/token {title}", number(3))
                for side, title in (("without", "off"), ("with", "on"))
                if any(row.mean(f"nll_{side}") is not None for row in rows)
            ),
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        said = [
            "Speed-up: seconds without / seconds with speculation, prompts included, in alternating runs of two "
            "engines with the same weights; median over the pairs of a seed; least and most: of its pairs.",
            "Accepted: of the draft tokens. Acceptance length: 1 + accepted tokens per draft. Tokens/forward: output "
            "tokens per step of a row, rows without a draft included.",
            "Drafting: seconds per step, of a step without speculation. Formula: tokens/forward / (1 + drafting), the "
            "speed-up if a step took as long with drafts as without.",
        ]
        if any(row.mean("nll_with") is not None for row in rows):
            said.append("Nats/token: of the texts of both sides under the model that was to write them.")
        return said + compilation_note(rows)

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws tokens per forward and the speed-up; see `speculative_figure`."""
        from ksana_jax.lab.runs.tasks.row_figure import draw_columns
        from ksana_jax.lab.runs.tasks.speculative_figure import draw

        if not draw(figure, [row for row in rows if row.trials]):
            shown = [c for c in self.columns(rows) if c.key in ("per_forward", "gain")]
            draw_columns(figure, rows, [dataclasses.replace(column, best="max") for column in shown])


_COUNTS = ("num_output_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "proposer_s", "num_steps")


def with_drafts(plain: LLM, speculative_config: Mapping[str, Any], params: Sequence[Any]) -> LLM:
    """Returns an engine with the same weights and settings that drafts. One that chooses how long drafts are by the
    seconds of steps measures them first, as servers do; params: of its requests."""

    def make() -> LLM:
        made = with_changes(plain, speculative_config=dict(speculative_config))
        if (method := read_speculative(speculative_config)) is not None and method.adaptive == "goodput":
            made.warm_up(sampling_params=params)
        return made

    return twin(plain, repr(sorted(speculative_config.items())), make, newest_only=True)


def _requests(settings: SpeculativeSettings, llm: LLM, seed: int) -> tuple[list, list, list]:
    """Returns the timed prompts, other requests' prompts, and prompts whose outputs are given to tries."""
    counts = np.cumsum([settings.num_requests, settings.traffic, settings.preloaded]).tolist()
    drawn = PROMPTS[settings.prompts](settings.texts, llm.tokenizer, counts[-1], settings.prompt_tokens, seed)
    # Some of the prompts that share a text are timed and some are not.
    order = np.random.default_rng(seed).permutation(counts[-1])
    drawn = [drawn[i] for i in order]
    return drawn[: counts[0]], drawn[counts[0] : counts[1]], drawn[counts[1] :]


def _params(settings: SpeculativeSettings, count: int, seed: int) -> list[Any]:
    given = {"temperature": settings.temperature}
    return [forced(settings.output_tokens, seed=(seed << 20) + i, **given) for i in range(count)]


def _outputs(llm: LLM, prompts: list, settings: SpeculativeSettings, seed: int, salt: str = "") -> list[list[int]]:
    asked = [{"prompt_token_ids": ids, "cache_salt": salt} if salt else {"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(asked, _params(settings, len(asked), seed + 1))
    return [list(output.check().outputs[0].token_ids) for output in outputs]


def _timed(
    llm: LLM, prompts: list, settings: SpeculativeSettings, seed: int, salt: str
) -> tuple[Measurement, list[list[int]]]:
    """Serves prompts, batch by batch; measures seconds, counts of drafts, and digests of the texts. Returns the
    texts, too."""
    params, size = _params(settings, len(prompts), seed), settings.batch_size
    asked = [{"prompt_token_ids": ids, "cache_salt": salt} for ids in prompts]
    llm.clear_records()
    before, compiled, began = _counted(llm), llm.num_compilations, time.perf_counter()
    outputs = []
    for at in range(0, len(asked), size):
        outputs += llm.generate(asked[at : at + size], params[at : at + size])
    seconds, after = time.perf_counter() - began, _counted(llm)
    tokens = [list(output.check().outputs[0].token_ids) for output in outputs]
    measured = {
        "seconds": seconds,
        "compiled_while_timed": llm.num_compilations - compiled,
        "num_requests": len(outputs),
        "num_output_tokens": sum(map(len, tokens)),
        "num_steps": len(llm.records),
        **{key: (np.array(after[key]) - before[key]).tolist() for key in after},
        "digests": [hashlib.sha256(np.array(ids, "<i4").tobytes()).hexdigest()[:12] for ids in tokens],
    }
    return measured, tokens


def _nll(llm: LLM, prompts: list[list[int]], outputs: list[list[int]]) -> float:
    """Returns the mean nats per token of outputs after prompts under a model, but for their last tokens."""
    whole = [{"prompt_token_ids": [*p, *output[:-1]]} for p, output in zip(prompts, outputs, strict=True)]
    scored = zip(prompts, token_scores(llm, whole), strict=True)
    return statistics.fmean(-score.logprob for prompt, scores in scored for score in scores[len(prompt) - 1 :])


def _counted(llm: LLM) -> dict[str, Any]:
    """Returns an engine's counts of its drafts; empty without drafts."""
    speculation = llm.engine.scheduler.speculation
    if speculation is None:
        return {}
    counts = speculation.counts
    found = {field.name: getattr(counts, field.name) for field in dataclasses.fields(counts)}
    return found | {"accepted_per_pos": counts.accepted_per_pos.tolist()}


def _acceptance(totals: Mapping[str, float], per_position: Sequence[int]) -> dict[str, float]:
    drafts, drafted, accepted = (totals[f"num_{name}"] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    # Every step of a row yields one token of the model's own.
    result = {"per_forward": totals["num_output_tokens"] / (totals["num_output_tokens"] - accepted)}
    if drafts:
        result |= {"acceptance_rate": accepted / drafted, "acceptance_length": 1 + accepted / drafts}
        # A draft is compared up to its first wrong token.
        result["alpha"] = accepted / (accepted + drafts - per_position[-1])
    return result


def _lossless(settings: SpeculativeSettings) -> bool:
    method = read_speculative(settings.speculative_config)
    assert method is not None
    return method.acceptance == "sampled" or (settings.temperature == 0 and method.acceptance in ("rejection", "block"))


def _same(measurements: Sequence[Measurement]) -> float | None:
    sides = (of_side(measurements, "without"), of_side(measurements, "with"))
    found = [
        a == b for one, other in zip(*sides, strict=True) for a, b in zip(one["digests"], other["digests"], strict=True)
    ]
    return statistics.fmean(found) if found else None
