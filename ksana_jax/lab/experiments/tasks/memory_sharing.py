"""Savings from sharing blocks between the samples or beams of a prompt, compared with unshared rows.

Both sides use the same pool, which is too small for all rows at once. "with" requests `width` samples or beams per
prompt. "without" submits the same rows as separate requests of one sample or one beam, each with its own cache salt, so
that each computes its prompt and holds all its blocks. The cache copies that an unshared beam search makes are not
counted. With width 1, both sides are the same.

Source of the question: vLLM, arXiv:2309.06180, section 6.3; blocks saved are counted as there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError
from ksana_jax.core.request import MAX_BEAM_WIDTH, MAX_N
from ksana_jax.lab.experiments import texts
from ksana_jax.lab.experiments.asking import forced
from ksana_jax.lab.experiments.figures import integer_ticks, legend
from ksana_jax.lab.experiments.tasks.base import INPUT_TEXTS, TrialContext, int_field
from ksana_jax.lab.experiments.tasks.paired import PairedTask, caveat, of_side, speeds, timed
from ksana_jax.lab.experiments.tasks.results import Column, Measurement, ResultRow, compilation_note, number, percent
from ksana_jax.lab.experiments.tasks.row_figure import draw_means

if TYPE_CHECKING:
    from matplotlib.figure import Figure


METHODS = {"sample": MAX_N, "beam": MAX_BEAM_WIDTH}


@dataclasses.dataclass
class SharingSettings:
    """Fields of `settings` in a memory_sharing experiment.

    texts: sources of the prompts: files, folders, patterns or file.jsonl#field, see `lab.experiments.text_files`;
      relative to the YAML file. Empty takes the held-out texts. The seed draws among them. A model without a tokenizer
      gets random tokens.
    method: "sample" draws `width` samples of each prompt, "beam" searches with `width` beams.
    width: samples or beams per prompt.
    num_rows: total number of sequences, a multiple of width: num_rows / width prompts, all submitted at the start.
    prompt_tokens: tokens of each prompt, BOS included.
    output_tokens: output tokens of each sequence, regardless of EOS.
    num_pairs: timed runs of each side.
    """

    texts: list[str] = dataclasses.field(default_factory=list, metadata=INPUT_TEXTS)
    method: str = "sample"
    width: int = 4
    num_rows: int = int_field(48)
    prompt_tokens: int = int_field(64)
    output_tokens: int = int_field(128)
    num_pairs: int = int_field(1)


class MemorySharing(PairedTask):
    """The task `memory_sharing`. See the module's docstring."""

    Settings = SharingSettings

    def check(self, config: Mapping[str, Any]) -> None:
        settings = SharingSettings(**config["settings"])
        checks.require(checks.one_of("settings.method", settings.method, METHODS), error=ConfigError)
        width = f"settings.width of method {settings.method}"
        checks.require(checks.integer(width, settings.width, 1, METHODS[settings.method]), error=ConfigError)
        if settings.num_rows % settings.width:
            raise ConfigError(f"settings.num_rows is {settings.num_rows}, must be a multiple of width {settings.width}")
        count, cut = settings.num_rows // settings.width, texts.Cut(settings.prompt_tokens)
        texts.check_config(config, count, cut, "settings.num_rows / settings.width")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings, llm = SharingSettings(**trial.config["settings"]), trial.llm
        count, length = settings.num_rows // settings.width, settings.prompt_tokens
        prompts = texts.prompts_for(llm, settings.texts, count, length, trial.seed)
        yield {"metric": "setting", **{k: v for k, v in dataclasses.asdict(settings).items() if k != "texts"}}

        def serve(rows: list[list[int]], width: int, salt: str) -> Measurement:
            return timed(llm, *_requests(rows, dataclasses.replace(settings, width=width), trial.seed, salt))

        rows = [ids for ids in prompts for _ in range(settings.width)]
        sides = functools.partial(serve, rows, 1), functools.partial(serve, prompts, settings.width)
        yield from self.measure(trial, *sides)

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes saved, 1 - blocks held / unshared count, both summed over steps; saved_at_peak, in the step with the
        highest unshared count; gain, seconds without / seconds with."""
        runs = of_side(measurements, "with")
        result = speeds(measurements)
        for name in ("mean_blocks", "mean_unshared", "peak_blocks", "peak_unshared", "num_blocks"):
            result[name] = sum(m[name] for m in runs) / len(runs)
        result["saved"] = 1 - result["mean_blocks"] / result["mean_unshared"]
        result["saved_at_peak"] = 1 - result["peak_blocks"] / result["peak_unshared"]
        return result

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("mean_running_with", "rows at once", number(1)),
            Column("mean_blocks", "blocks held", number(1)),
            Column("mean_unshared", "unshared count", number(1)),
            Column("saved", "saved, %", percent(), "max"),
            Column("saved_at_peak", "saved at peak, %", percent(), "max"),
            Column("requests_per_s_without", "requests/s apart", number(2)),
            Column("requests_per_s_with", "requests/s shared", number(2)),
            Column("tokens_per_s_without", "tokens/s apart", number(0)),
            Column("tokens_per_s_with", "tokens/s shared", number(0)),
            Column("gain", "gain, ×", number(2), "max"),
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        sizes = {size for r in rows if (size := r.mean("num_blocks"))}
        pools = [number(0)(size) for size in sorted(sizes)]
        return [
            f"Both sides have the same pool: {' or '.join(pools) or '?'} blocks.",
            "Blocks held: in use within a step, mean over steps; unshared count: blocks that the rows of the step "
            "would hold without sharing; peak: the step with the highest unshared count.",
            "Apart: the same rows as requests of one sample or one beam that share nothing (no copies of caches are "
            "made). Gain: seconds apart / seconds shared, in alternating runs; with width 1, both are the same.",
            "vLLM's paper (OPT-13B on an A100, arrivals at random) saved 6.1-9.8 % with parallel sampling and "
            "37.6-55.2 % with beams on Alpaca, 16.2-30.5 % and 44.3-66.3 % on ShareGPT.",
            *compilation_note(rows),
        ]

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        said = []
        for label, members in _by_label(rows).items():
            wide = [r for r in members if _width(r) > 1]
            saved, gains = [[v for r in wide if (v := r.mean(k)) is not None] for k in ("saved", "gain")]
            if saved:
                said.append(
                    f"{label or 'this configuration'}: {_span([100 * s for s in saved], 0)} % of the blocks saved and "
                    f"{_span(gains, 2)} times the requests/s"
                    + (
                        f" ({unsure} of {len(wide)} not resolved)"
                        if (unsure := sum(bool(caveat(r)) for r in wide))
                        else ""
                    )
                )
        return "With sharing, in the same pool: " + "; ".join(said) + "." if said else ""

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws blocks saved above and throughput gained below, over the width; one line per label."""
        above, below = figure.subplots(2, 1, sharex=True)
        for index, (label, members) in enumerate(_by_label(rows).items()):
            widths = [_width(r) for r in members]
            for axes, key, scale in ((above, "saved", 0.01), (below, "gain", 1)):
                draw_means(axes, widths, [(r, key) for r in members], index, label, scale)
        integer_ticks(below, [_width(r) for r in rows if r.trials])
        below.axhline(1, color="0.6", linewidth=0.6)
        above.set_ylabel("blocks saved (%)")
        below.set_ylabel("throughput gained (×)")
        below.set_xlabel("samples or beams of a request")
        legend(figure, above)


def _requests(prompts: list[list[int]], settings: SharingSettings, seed: int, salt: str):
    """Returns prompts and parameters of requests with `width` rows each."""
    how = {"n": settings.width} | ({"beam_width": settings.width} if settings.method == "beam" else {})
    given = [{"prompt_token_ids": ids, "cache_salt": f"{salt} {i}"} for i, ids in enumerate(prompts)]
    return given, [forced(settings.output_tokens, seed=1000 * seed + i, **how) for i in range(len(prompts))]


def _width(row: ResultRow) -> int:
    return next(m["width"] for m in row.trials[0] if m["metric"] == "setting")


def _by_label(rows: Sequence[ResultRow]) -> dict[str, list[ResultRow]]:
    """Returns the measured rows by label, ordered by width."""
    groups: dict[str, list[ResultRow]] = defaultdict(list)
    for row in rows:
        if row.trials:
            groups[row.label].append(row)
    return {label: sorted(members, key=_width) for label, members in groups.items()}


def _span(values: Sequence[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"
