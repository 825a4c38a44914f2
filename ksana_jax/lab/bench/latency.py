"""`ksana bench latency`: time to the first token and per output token, by batch and context."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.sources import MODEL_HELP, model_path
from ksana_jax.lab.bench.core import Bench, Case, option, spread
from ksana_jax.lab.runs.asking import forced
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, milliseconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ksana_jax import LLM
    from ksana_jax.core.metrics import StepRecord


@dataclasses.dataclass
class Latency(Bench):
    """Measures the time to the first token (TTFT) and per output token (TPOT) by batch and prompt length.

    The requests of a batch arrive at once; prompts are random token ids, decoding is greedy and ignores EOS."""

    model: str = option("bench-s", MODEL_HELP)
    dtype: str = option("f32", "f32, bf16 or f16")
    batch: tuple[int, ...] = option((1, 8, 32), "requests that arrive at once")
    prompt: tuple[int, ...] = option((32, 128, 512), "tokens of each prompt")
    output_tokens: int = option(32, "tokens that each request generates")
    seed: int = option(0, "seed of weights and prompts")

    def title(self) -> str:
        return f"Latency of {self.model}, {self.dtype}, {self.output_tokens} output tokens"

    def cases(self) -> list[Case]:
        counts = [("batch", b) for b in self.batch] + [("prompt", p) for p in self.prompt]
        checks.require(
            *(checks.integer(name, count) for name, count in counts),
            checks.integer("output_tokens", self.output_tokens, 2),
            error=ConfigError,
        )
        return [Case("", {"batch": b, "prompt": p}) for b, p in itertools.product(self.batch, self.prompt)]

    def start(self) -> None:
        longest = max(self.prompt) + self.output_tokens
        self.llm = make_llm(
            self.model, dtype=self.dtype, seed=self.seed, max_num_seqs=max(self.batch), max_model_len=longest
        )
        self.llm.warm_up()

    def measure(self, case: Case) -> Measurement:
        import numpy as np

        batch, prompt = case.point["batch"], case.point["prompt"]
        rng = np.random.default_rng(self.seed)
        prompts = rng.integers(3, self.llm.model_config.vocab_size, (batch, prompt))
        params = forced(self.output_tokens, temperature=0)
        self.llm.clear_records()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        metrics = [output.check().metrics for output in outputs]
        first = [m.ttft_s for m in metrics if m.ttft_s is not None]
        rest = [m.tpot_s for m in metrics if m.tpot_s is not None]
        return {
            "ttft_s": float(np.median(first)),
            "ttft_last_s": max(first),
            "tpot_s": float(np.median(rest)),
            "step_s": decode_seconds(self.llm.records, batch),
        }

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("ttft_s", "TTFT, ms", milliseconds()),
            spread("ttft_s"),
            Column("ttft_last_s", "TTFT last, ms", milliseconds()),
            Column("tpot_s", "TPOT, ms", milliseconds()),
            spread("tpot_s"),
            Column("step_s", "decode step, ms", milliseconds()),
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        return [
            "TTFT: median over the requests of a batch, from arrival to the first token; last: of the request served "
            "last. TPOT: mean time per later token, median over requests, with the prompts of others that were "
            "computed meanwhile. Decode step: median time between steps in which all requests decode; their context is "
            "the prompt and half of the output on average.",
            *super().notes(rows),
        ]

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws TTFT above and TPOT below over the prompt length, a line per batch."""
        from ksana_jax.lab.runs.figures import legend
        from ksana_jax.lab.runs.tasks.row_figure import draw_panels

        measured = [row for row in rows if row.values]
        keys = [("ttft_s", "TTFT (ms)", 1e-3), ("tpot_s", "TPOT (ms)", 1e-3)]
        panels = draw_panels(figure, measured, keys)
        for axes in panels:
            axes.set_yscale("log")
        panels[-1].set_xlabel("prompt (tokens)")
        legend(figure, panels[0], ncols=3)


def make_llm(model: str, **settings: Any) -> LLM:
    """Creates an engine for a measurement; a model without weights gets random ones."""
    from ksana_jax import LLM
    from ksana_jax.loading.tensor_files import has_weights

    if not has_weights(model_path(model)):
        settings.setdefault("load_format", "dummy")
    return LLM(model, **settings)


def decode_seconds(records: Sequence[StepRecord], batch: int) -> float | None:
    """Returns the median time between the ends of successive steps that compute one token for each of `batch` rows and
    nothing else; None without two such steps in succession."""
    import numpy as np

    alone = [record.num_decodes == record.num_tokens == batch for record in records]
    pairs = zip(records, records[1:], alone, alone[1:], strict=False)
    between = [b.ended_s - a.ended_s for a, b, *both in pairs if all(both)]
    return float(np.median(between)) if between else None
