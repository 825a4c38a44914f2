"""Sink strength: how much attention the first positions receive, by layer, and how small the first value is.

Sink_k is the fraction of (layer, head, text) where position k receives more than epsilon of the attention of the
queries that see it, averaged over num_tokens. Computed by dense attention over whole texts in float32, without an
engine.

Source: arXiv:2410.10781, section 3.1; there epsilon is 0.3, num_tokens 64, with 100 texts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs import texts
from ksana_jax.lab.runs.figures import legend
from ksana_jax.lab.runs.models import tokenizer_of
from ksana_jax.lab.runs.tasks.base import INPUT_TEXTS, BaseTask, TrialContext, float_field, int_field
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, number, of_metric, percent
from ksana_jax.lab.runs.tasks.row_figure import draw_means

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ksana_jax.core.config import ModelConfig
    from ksana_jax.models import Params

_BATCH = 20  # texts at once: their attention weights are [L, texts, N, T, T]


@dataclasses.dataclass
class SinkStrengthSettings:
    """Fields of `settings` in the YAML file.

    texts: files, folders, patterns or file.jsonl#field, see `lab.runs.text_files`; relative to the YAML file.
      Empty takes the held-out texts of the embedded model's corpus.
    num_texts: number of excerpts.
    num_tokens: tokens of each excerpt, including BOS if the tokenizer has one.
    num_first: number of first positions to measure.
    epsilon: attention above which a position counts as a sink.
    """

    texts: list[str] = dataclasses.field(default_factory=list, metadata=INPUT_TEXTS)
    num_texts: int = int_field(100)
    num_tokens: int = int_field(64, 2)
    num_first: int = 4
    epsilon: float = float_field(0.3, low=0, below=1)


class SinkStrength(BaseTask):
    """The task of this study. See the module's docstring."""

    Settings = SinkStrengthSettings
    measures_speed = False

    def max_model_len(self, settings: SinkStrengthSettings) -> int:
        return settings.num_tokens

    def num_tokens(self, config: Mapping[str, Any]) -> int:
        settings = SinkStrengthSettings(**config["settings"])
        return settings.num_texts * settings.num_tokens

    def check(self, config: Mapping[str, Any]) -> None:
        settings = SinkStrengthSettings(**config["settings"])
        first = checks.integer("settings.num_first", settings.num_first, 1, settings.num_tokens)
        checks.require(first, error=ConfigError)
        if config["pattern"] is not None or config["layer_patterns"]:
            raise ConfigError("SinkStrength measures the model's own attention: leave pattern unset")
        cut = texts.ExcerptSpec(settings.num_tokens, setting="settings.num_tokens")
        texts.check_config(config, settings.num_texts, cut, "settings.num_texts")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        from experiments.training.sink_measures import sink_measures, sink_strength

        settings, name = SinkStrengthSettings(**trial.config["settings"]), trial.config["model"]
        tokenizer, (model, params) = tokenizer_of(name), _loaded(name, trial.config["load_format"])
        chosen = texts.draw_excerpts(
            settings.texts, tokenizer, settings.num_texts, texts.ExcerptSpec(settings.num_tokens), trial.seed
        )
        tokens = np.array([excerpt.ids for excerpt in chosen], np.int32)
        batches = []
        for begin in range(0, len(tokens), _BATCH):
            batch = tokens[begin : begin + _BATCH]
            found = sink_measures(params, batch, config=model, num_first=settings.num_first)
            batches.append([np.asarray(part, np.float64) for part in found])
            trial.progress(min(1.0, (begin + _BATCH) / len(tokens)))
        received, ratios = (np.concatenate(parts, axis=1) for parts in zip(*batches, strict=True))
        yield {
            "metric": "texts",
            "digest": hashlib.sha256(tokens.astype("<i8").tobytes()).hexdigest()[:12],
            "begins_with_bos": tokenizer.bos_id is not None,
            "num_tokens": settings.num_tokens,
            "epsilon": settings.epsilon,
        }
        for layer, (attention, ratio) in enumerate(zip(received, ratios, strict=True)):
            yield {
                "metric": "layer",
                "layer": layer,
                "sink": sink_strength(attention[None], settings.epsilon).tolist(),
                "received": attention.mean(axis=(0, 1)).tolist(),
                "received_by_head": attention[..., 0].mean(axis=0).tolist(),
                "value_norm_ratio": float(ratio.mean()),
            }

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes sink_1 .. sink_k; mean attention to the first position and its value's norm ratio, also by layer."""
        layers = [m for m in measurements if m["metric"] == "layer"]
        sinks = np.mean([m["sink"] for m in layers], axis=0)
        received, ratios = ([m["received"][0] for m in layers], [m["value_norm_ratio"] for m in layers])
        result = {f"sink_{k}": float(value) for k, value in enumerate(sinks, start=1)}
        result |= {"received": float(np.mean(received)), "most_received": max(received)}
        result |= {"value_norm_ratio": float(np.mean(ratios))}
        for m in layers:
            result[f"received_layer_{m['layer']}"] = m["received"][0]
            result[f"value_norm_ratio_layer_{m['layer']}"] = m["value_norm_ratio"]
        return result

    def sample(self, key: str, measurements: Sequence[Measurement]) -> Hashable | None:
        return next(m["digest"] for m in measurements if m["metric"] == "texts")

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        count = max((len([k for k in row.values if k.startswith("sink_")]) for row in rows), default=0)
        return [
            *(Column(f"sink_{k}", f"Sink_{k}, %", percent()) for k in range(1, count + 1)),
            Column("received", "attention to the first position", number(3)),
            Column("most_received", "in the layer with the most", number(3)),
            Column("value_norm_ratio", "norm of its value / median", number(2)),
        ]

    def headline(self, rows: Sequence[ResultRow]) -> Column | None:
        return next(iter(self.columns(rows)), None)

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        about = of_metric(rows, "texts")
        said = []
        for num_tokens, epsilon in sorted({(m["num_tokens"], m["epsilon"]) for m in about}):
            said.append(
                f"Sink_k: fraction of (layer, head, text) in which position k receives more than {epsilon:g} of the "
                f"attention, averaged over {num_tokens:,} tokens; uniform attention pays {_uniform(num_tokens):.3f} to "
                "the first."
            )
        if len({m["begins_with_bos"] for m in about}) > 1:
            said.append("NOT COMPARABLE: the texts of some models begin with BOS, of others not.")
        elif about:
            said.append(f"Position 1 is {'BOS' if about[0]['begins_with_bos'] else 'the first token of the text'}.")
        return said

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws attention to the first position above and the norm of its value below, over layers."""
        measured = [row for row in rows if row.trials]
        above, below = figure.subplots(2, 1, sharex=True)
        num_layers = 0
        for index, row in enumerate(measured):
            layers = range(len([m for m in row.trials[0] if m["metric"] == "layer"]))
            num_layers = max(num_layers, len(layers))
            for axes, key in ((above, "received"), (below, "value_norm_ratio")):
                draw_means(axes, layers, [(row, f"{key}_layer_{n}") for n in layers], index, row.name)
        for num_tokens in {m["num_tokens"] for row in measured for m in row.trials[0] if m["metric"] == "texts"}:
            above.axhline(_uniform(num_tokens), color="#999999", linewidth=0.8, linestyle=":", label="uniform")
        below.axhline(1.0, color="#999999", linewidth=0.8, linestyle=":")
        above.set_ylabel("attention to position 1")
        below.set_ylabel("norm of its value / median")
        below.set_xlabel("layer")
        below.locator_params(axis="x", integer=True)
        for axes in (above, below):
            axes.set_ylim(bottom=0)
        legend(figure, above)


@functools.lru_cache(maxsize=1)
def _loaded(name: str, load_format: Literal["auto", "dummy"]) -> tuple[ModelConfig, Params]:
    """Loads a model's config and float32 weights; the last one stays loaded for its other seeds."""
    from ksana_jax.loading import load_model

    return load_model(name, load_format=load_format)


def _uniform(num_tokens: int) -> float:
    """The weight that uniform causal attention gives to the first of num_tokens positions, averaged over them."""
    return sum(1 / count for count in range(1, num_tokens + 1)) / num_tokens
