"""Generation under load: time to first token, time per token, throughput, and KV memory."""

from __future__ import annotations

import dataclasses
import statistics
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ksana_jax.lab.runs import texts
from ksana_jax.lab.runs.asking import forced, run_warm
from ksana_jax.lab.runs.tasks.base import INPUT_TEXTS, BaseTask, TrialContext, int_field
from ksana_jax.lab.runs.tasks.results import (
    Column,
    Measurement,
    ResultRow,
    compilation_note,
    kib,
    milliseconds,
    number,
    preemption_note,
)

if TYPE_CHECKING:
    from ksana_jax import LLM
    from ksana_jax.core.outputs import RequestOutput

# Maximum points of a curve in a record; a long run has more steps than a figure has pixels.


@dataclasses.dataclass
class GenerateSettings:
    """Fields of `settings` in a generate experiment.

    texts: sources of the prompts: files, folders, patterns or file.jsonl#field, see `lab.runs.text_files`;
      relative to the YAML file. Empty takes the held-out texts. The seed draws among them.
    random_prompts: draw the tokens of prompts at random, by the seed, instead of cutting texts: for models without a
      tokenizer.
    num_prompts: number of requests, all submitted at the start.
    prompt_tokens: tokens of each prompt, BOS included.
    output_tokens: tokens of each output, regardless of EOS.
    temperature: 0 takes the most probable token.
    """

    texts: list[str] = dataclasses.field(default_factory=list, metadata=INPUT_TEXTS)
    random_prompts: bool = False
    num_prompts: int = int_field(8)
    prompt_tokens: int = int_field(128)
    output_tokens: int = int_field(64)
    temperature: float = 0.0


class Generate(BaseTask):
    """The task `generate`. See the module's docstring."""

    Settings = GenerateSettings

    def max_model_len(self, settings: GenerateSettings) -> int:
        return settings.prompt_tokens + settings.output_tokens

    def num_tokens(self, config: Mapping[str, Any]) -> int:
        settings = GenerateSettings(**config["settings"])
        return settings.num_prompts * (settings.prompt_tokens + settings.output_tokens)

    def check(self, config: Mapping[str, Any]) -> None:
        settings = GenerateSettings(**config["settings"])
        if settings.random_prompts:
            return
        texts.check_config(
            config, settings.num_prompts, texts.ExcerptSpec(settings.prompt_tokens), "settings.num_prompts"
        )

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings, llm = GenerateSettings(**trial.config["settings"]), trial.llm
        prompts = _prompts(settings, llm, trial.seed)
        compiled_before = llm.num_compilations
        count, sampling = settings.output_tokens, {"temperature": settings.temperature, "seed": trial.seed}
        params = forced(count, min_tokens=count, **sampling)

        def serve() -> list[RequestOutput]:
            # Each run has its own salt, so prefix cache hits come from this run only.
            salt = uuid.uuid4().hex
            outputs = llm.generate([{"prompt_token_ids": ids, "cache_salt": salt} for ids in prompts], params)
            trial.progress(0.5)
            return outputs

        outputs, seconds, compiled = run_warm(llm, serve)
        for output in outputs:
            yield _request(output.check())
        yield {
            "metric": "speed",
            "seconds": seconds,
            "compiled_while_timed": compiled,
            "num_output_tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
        }
        length = settings.prompt_tokens + settings.output_tokens - 1  # the last token is not computed
        yield {"metric": "kv", "kv_token_bytes": llm.kv_bytes_per_token(length), **_blocks_over_time(llm, outputs)}
        yield {
            "metric": "compilations",
            "count": llm.num_compilations - compiled_before,
            "in_all": llm.num_compilations,
        }

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes ttft_s and tpot_s, means over requests; ttft_max_s, the longest; tokens_per_s, output tokens."""
        requests = [m for m in measurements if m["metric"] == "request"]
        (speed,) = [m for m in measurements if m["metric"] == "speed"]
        (kv,) = [m for m in measurements if m["metric"] == "kv"]
        result = {
            "tokens_per_s": speed["num_output_tokens"] / speed["seconds"],
            "compiled_while_timed": speed["compiled_while_timed"],
            # Earlier versions recorded the maximum between steps.
            "live_kv_bytes": (kv["held_blocks"] if "held_blocks" in kv else kv["max_live_blocks"]) * kv["block_bytes"],
            "peak_kv_bytes": kv["max_peak_blocks"] * kv["block_bytes"],
            "num_preemptions": kv["num_preemptions"],
            # Older records do not have them.
            **{key: kv[key] for key in ("kv_token_bytes", "max_running") if key in kv},
        }
        for name in ("ttft_s", "tpot_s"):
            if given := [m[name] for m in requests if m[name] is not None]:
                result[name] = statistics.fmean(given)
        result["ttft_max_s"] = max((m["ttft_s"] or 0 for m in requests), default=0)
        return result

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("ttft_s", "TTFT, ms", milliseconds(), "min"),
            Column("tpot_s", "TPOT, ms", milliseconds(), "min"),
            Column("tokens_per_s", "output tokens/s", number(0), "max"),
            Column("live_kv_bytes", "live KV, KiB", kib, "min", exact=True),
            Column("peak_kv_bytes", "peak KV, KiB", kib, "min", exact=True),
            Column("kv_token_bytes", "KV bytes/token", number(0), "min", exact=True),
            Column("max_running", "rows at once", number(0), "max", exact=True),
        ]

    def headline(self, rows: Sequence[ResultRow]) -> Column | None:
        return next(c for c in self.columns(rows) if c.key == "tokens_per_s")

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        earlier = any("max_live_blocks" in m for r in rows for trial in r.trials for m in trial)
        live = (
            "maximum held between steps, as earlier versions recorded it"
            if earlier
            else "maximum held after a step that generates tokens, with the requests that it ends"
        )
        return [
            "TTFT and TPOT: means over requests that all arrive at once.",
            f"Live KV: {live}; peak KV: maximum held within a step. Rows at once: most requests that ran in a step.",
            *compilation_note(rows),
            *preemption_note(rows, "num_preemptions"),
        ]


def _prompts(settings: GenerateSettings, llm: LLM, seed: int) -> list[list[int]]:
    """Returns the token ids of each prompt."""
    if settings.random_prompts:
        return texts.random_prompts(llm, settings.num_prompts, settings.prompt_tokens, seed)
    return texts.cut_prompts(settings.texts, llm.tokenizer, settings.num_prompts, settings.prompt_tokens, seed)


def _request(output: RequestOutput) -> Measurement:
    metrics = output.metrics
    return {
        "metric": "request",
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": len(output.outputs[0].token_ids),
        "ttft_s": metrics.ttft_s,
        "tpot_s": metrics.tpot_s,
        "num_preemptions": metrics.num_preemptions,
    }


def _blocks_over_time(llm: LLM, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    records = list(llm.records)
    return {
        "block_bytes": llm.block_bytes,
        "num_blocks": llm.num_blocks,
        "held_blocks": max(int(r.live_blocks) for r in records if r.num_new_tokens),
        "max_peak_blocks": max(int(r.peak_blocks) for r in records),
        "max_running": max(int(r.num_running) for r in records),
        "num_preemptions": sum(o.metrics.num_preemptions for o in outputs),
        "num_steps": len(records),
    }
