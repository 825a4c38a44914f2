"""Tokens and operations per second against the tokens of a step; MHA, GQA and MQA.

A step takes about a + b x tokens seconds: a to read the weights once, b to compute a token and read its keys and
values. The knee, a / b tokens, is where half of the largest speed 1 / b is reached.

Source of the knee: Hockney's n_1/2 (R. W. Hockney, C. R. Jesshope, Parallel Computers, 1981, section 1.3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.bench.core import Bench, Case, Unavailable, option, spread
from ksana_jax.lab.bench.latency import decode_seconds, make_llm
from ksana_jax.lab.runs.asking import forced
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, milliseconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ksana_jax import LLM
    from ksana_jax.core.config import ModelConfig
    from ksana_jax.core.outputs import RequestOutput

KINDS = {"MHA": "bench-s-8kv", "GQA": "bench-s-2kv", "MQA": "bench-s-1kv"}
STEPS = 8
BLOCK_SIZE = 16


@dataclasses.dataclass
class TokensInForward(Bench):
    """Measures tokens/s and FLOP/s of decode steps against their tokens, for MHA, GQA and MQA.

    Models differ only in the number of KV heads. Each token of a step belongs to a separate row, with a context of
    its own; the knee is the number of tokens at which half of the largest speed is reached."""

    dtype: str = option("f32", "f32, bf16 or f16")
    tokens: tuple[int, ...] = option((1, 2, 4, 8, 16, 32, 64, 128, 256), "tokens of a step, one per row")
    context: int = option(128, "tokens that each row has in the cache")
    price: float = option(1.0, "price of this machine per hour, in any currency, for the cost of a million tokens")
    models: dict[str, str] | None = option(None, "models by name, instead of shipped ones, such as '{GQA: bench-s}'")
    seed: int = option(0, "seed of weights and prompts")

    def title(self) -> str:
        return f"Tokens in a forward pass, {self.dtype}, context {self.context:,}, {', '.join(self._models().values())}"

    def _models(self) -> Mapping[str, str]:
        return self.models or KINDS

    def cases(self) -> list[Case]:
        checks.require(
            *(checks.integer("tokens", count) for count in self.tokens),
            checks.integer("context", self.context, 1),
            None
            if self.context % BLOCK_SIZE == 0
            else f"context is {self.context}, must be a multiple of {BLOCK_SIZE}",
            checks.number("price", self.price, above=0),
            error=ConfigError,
        )
        return [Case(name, {"tokens": count}) for name in self._models() for count in self.tokens]

    def start(self) -> None:
        rows, length = max(self.tokens), self.context + STEPS + 3
        settings: dict[str, Any] = {
            "dtype": self.dtype,
            "seed": self.seed,
            "max_num_seqs": rows,
            "max_model_len": length,
        }
        # Cached prompts leave one token of each to compute, so that all rows of a step start together.
        settings |= {"enable_prefix_caching": True, "max_num_batched_tokens": max(512, rows), "block_size": BLOCK_SIZE}
        # Only shapes that are measured are compiled, by the repetition that is not recorded.
        self.llms = {name: make_llm(model, **settings) for name, model in self._models().items()}
        for llm in self.llms.values():
            self._serve(llm, rows, max_tokens=1)

    def _serve(self, llm: LLM, rows: int, max_tokens: int) -> list[RequestOutput]:
        import numpy as np

        vocab_size, shape = llm.model_config.vocab_size, (max(self.tokens), self.context + 1)
        prompts = np.random.default_rng(self.seed).integers(3, vocab_size, shape, np.int32)
        params = forced(max_tokens, temperature=0)
        return [o.check() for o in llm.generate([{"prompt_token_ids": ids} for ids in prompts[:rows]], params)]

    def measure(self, case: Case) -> Measurement:
        llm, rows = self.llms[case.label], case.point["tokens"]
        llm.clear_records()
        outputs = self._serve(llm, rows, STEPS + 1)
        step_s = decode_seconds(llm.records, rows)
        if step_s is None or any(output.num_cached_tokens != self.context for output in outputs):
            held = f"{llm.num_blocks:,} blocks of {BLOCK_SIZE} tokens"
            raise Unavailable(f"{rows:,} rows of {self.context:,} tokens do not fit the pool of {held}: ask for fewer")
        return {
            "step_s": step_s,
            "tokens_per_s": rows / step_s,
            "flop_per_s": rows * flop_per_token(llm.model_config, self.context) / step_s,
            "cost": self.price / 3600 * step_s / rows * 1e6,
        }

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("step_s", "step, ms", milliseconds()),
            Column("tokens_per_s", "tokens/s", lambda value: f"{value:,.0f}"),
            spread("tokens_per_s"),
            Column("flop_per_s", "GFLOP/s", lambda value: f"{value / 1e9:,.1f}"),
            Column("cost", "cost of a million tokens", lambda value: f"{value:,.3g}"),
        ]

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        parts = []
        for name, found in _lines(rows).items():
            if (line := fit(found)) is not None:
                at, most = f"{line.knee:,.0f} tokens", f"{line.most:,.0f} tokens/s"
                parts.append(f"{name} {at} (largest speed {most}, {line.fixed_s * 1000:,.1f} ms + tokens / {most})")
        return f"Knee, where half of the largest speed is reached: {'; '.join(parts)}." if parts else ""

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        return [
            "Time of a step: median between steps in which all rows decode. FLOP: two per weight that multiplies, and "
            "four per query head, its width and cached token. The knee is of the line a + b x tokens nearest to "
            "the times of a row's steps, relative to them. Cost: of the machine's time at the price of an hour.",
            *super().notes(rows),
        ]

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws tokens/s above and GFLOP/s below over the tokens of a step; dotted lines are the knees."""
        from ksana_jax.lab.runs.figures import legend, line_style
        from ksana_jax.lab.runs.tasks.row_figure import draw_panels

        measured = [row for row in rows if row.values]
        keys = [("tokens_per_s", "tokens/s", 1.0), ("flop_per_s", "GFLOP/s", 1e9)]
        above, below = draw_panels(figure, measured, keys)
        for index, found in enumerate(_lines(rows).values()):
            line = fit(found)
            if line is not None and line.knee > 0:
                above.axvline(line.knee, color=line_style(index)["color"], linewidth=0.6, linestyle=":")
        for axes in (above, below):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        below.set_xlabel("tokens of a step")
        legend(figure, above, ncols=3)


class FittedLine(NamedTuple):
    """The time of a step as fixed_s + tokens / most."""

    fixed_s: float
    most: float

    @property
    def knee(self) -> float:
        """Tokens at which half of the largest speed is reached."""
        return self.fixed_s * self.most


def fit(points: Sequence[tuple[float, float]]) -> FittedLine | None:
    """Fits the line a + b x tokens to (tokens, seconds) by least squares of relative errors.

    Returns None if there are fewer than two points, or times do not rise.
    """
    import numpy as np

    if len(points) < 2:
        return None
    tokens, seconds = np.array(points, float).T
    (fixed_s, per_token), *_ = np.linalg.lstsq(np.stack([1 / seconds, tokens / seconds], 1), np.ones(len(points)))
    return FittedLine(max(float(fixed_s), 0.0), float(1 / per_token)) if per_token > 0 else None


def flop_per_token(model: ModelConfig, context: int) -> int:
    """Returns the operations of one token that attends to `context` others; a lookup in the embedding is none."""
    from ksana_jax.models.params import num_active_params

    looked_up = 0 if model.tie_embeddings else model.vocab_size * model.d_model
    attended = model.num_layers * model.num_heads * model.head_dim * context
    return 2 * (num_active_params(model) - looked_up) + 4 * attended


def _lines(rows: Sequence[ResultRow]) -> dict[str, list[tuple[float, float]]]:
    """Returns (tokens, seconds of a step) of each model."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if (step_s := row.mean("step_s")) is not None:
            found.setdefault(row.label, []).append((row.point["tokens"], step_s))
    return found
