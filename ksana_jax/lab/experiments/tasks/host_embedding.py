"""Gain from moving the token embedding to the host and using its device memory for KV blocks.

Weights and pool together take the same device memory on both sides: "without" is the engine as configured, "with" has
its embedding on the host and a pool enlarged by the embedding's bytes. The planner does the same calculation for a
model that is too large to run here.

Source of the question: KsanaLLM's hybrid embedding, where an embedding of 11.8 % of the parameters gave +10 %.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.experiments.asking import forced
from ksana_jax.lab.experiments.figures import COLOURS, bars, legend
from ksana_jax.lab.experiments.tasks.base import TrialContext, int_field
from ksana_jax.lab.experiments.tasks.paired import PairedTask, caveat, speeds, timed, with_changes
from ksana_jax.lab.experiments.tasks.results import Column, Measurement, ResultRow, compilation_note, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ksana_jax import LLM


@dataclasses.dataclass
class HostEmbeddingSettings:
    """Fields of `settings` in a host_embedding experiment.

    num_requests: number of requests, all submitted at the start.
    prompt_tokens: tokens of each prompt, drawn at random by the seed.
    output_tokens: tokens of each output, regardless of EOS.
    num_pairs: timed runs of each side.
    planned_model, planned_device, planned_dtype: arguments of the plan; see `ksana plan`.
    planned_context: tokens of each request in the plan.
    """

    num_requests: int = int_field(32)
    prompt_tokens: int = int_field(64)
    output_tokens: int = int_field(48)
    num_pairs: int = int_field(1)
    planned_model: str = "configs/models/llama-2-13b-vocab300k"
    planned_device: str = "a100-40g"
    planned_dtype: str = "bf16"
    planned_context: int = int_field(1024)


class HostEmbedding(PairedTask):
    """The task `host_embedding`. See the module's docstring."""

    Settings = HostEmbeddingSettings

    def inputs(self, settings: HostEmbeddingSettings) -> dict[str, str]:
        from ksana_jax.lab.experiments.models import fingerprint

        return fingerprint(settings.planned_model, "dummy", key="planned_model")

    def check(self, config: Mapping[str, Any]) -> None:
        from ksana_jax.runner.planner.devices import find_device

        settings, engine = HostEmbeddingSettings(**config["settings"]), config["engine"]
        find_device(settings.planned_device)
        if engine["embedding_device"] != "device" or engine["num_blocks"] is None:
            raise ConfigError("engine.num_blocks must be set, and engine.embedding_device must be 'device'")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings, on_device = HostEmbeddingSettings(**trial.config["settings"]), trial.llm
        yield {"metric": "planned", **_planned(settings)}
        on_host = _with_embedding_on_host(on_device)
        yield {"metric": "measured", **_memory(on_device, on_host)}
        rng = np.random.default_rng(trial.seed)
        drawn = rng.integers(3, on_device.model_config.vocab_size, (settings.num_requests, settings.prompt_tokens))
        prompts = [{"prompt_token_ids": ids} for ids in drawn]
        params = [forced(settings.output_tokens, temperature=0)] * settings.num_requests

        def serve(llm: LLM, _salt: str) -> Measurement:
            return timed(llm, prompts, params)

        yield from self.measure(trial, functools.partial(serve, on_device), functools.partial(serve, on_host))

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes planned_* and blocks_*, KV blocks of a side; more_*, "with" / "without" - 1; share, the embedding's
        fraction of the weights; gain, throughput with / without - 1."""
        planned, measured = (next(m for m in measurements if m["metric"] == n) for n in ("planned", "measured"))
        result = speeds(measurements)
        result["more_throughput"] = result.pop("gain") - 1
        for name, found in (("planned", planned), ("measured", measured)):
            for key in ("blocks_without", "blocks_with", "requests_without", "requests_with"):
                if key in found:
                    result[f"{name}_{key}"] = found[key]
            result[f"more_{name}"] = found["blocks_with"] / found["blocks_without"] - 1
            result[f"{name}_share"] = found["embedding_bytes"] / found["weights_bytes"]
        return result

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("planned_blocks_without", "planned blocks", number(0), exact=True),
            Column("planned_blocks_with", "planned, on host", number(0), exact=True),
            Column("more_planned", "more planned, %", _percent, exact=True),
            Column("measured_blocks_without", "blocks", number(0), exact=True),
            Column("measured_blocks_with", "blocks, on host", number(0), exact=True),
            Column("more_measured", "more blocks, %", _percent, exact=True),
            Column("mean_running_without", "rows", number(1)),
            Column("mean_running_with", "rows, on host", number(1)),
            Column("tokens_per_s_without", "tokens/s", number(0)),
            Column("tokens_per_s_with", "tokens/s, on host", number(0)),
            Column("more_throughput", "more tokens/s, %", _percent),
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        done = [r for r in rows if r.trials]
        said = []
        if done:
            share, planned_share = (100 * (done[0].mean(f"{n}_share") or 0) for n in ("measured", "planned"))
            said.append(
                f"The embedding is {share:.1f} % of the weights of the measured model and {planned_share:.1f} % of "
                f"those of the planned model ({_planned_name(done[0])}); both have an output head of the same size."
            )
        said += [
            "Weights and pool together take the same device memory on both sides of a row; on host: with the embedding "
            "on the host. Planned: blocks that weights and a step leave in 90 % of the device, at the largest batch.",
            "Rows: concurrent sequences, mean over steps. Tokens/s: output tokens, medians of alternating runs.",
            "KsanaLLM's article reports +10 % throughput for an embedding of 11.8 % of the parameters.",
        ]
        return said + compilation_note(rows)

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        said = []
        for row in rows:
            more, gained = row.mean("more_measured"), row.mean("more_throughput")
            if more is not None and gained is not None:
                unsure = f" ({said_of})" if (said_of := caveat(row)) else ""
                said.append(f"{row.name}: {100 * more:+.0f} % blocks, {100 * gained:+.1f} % throughput{unsure}")
        return "; ".join(said) + "." if said else ""

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws the gains in blocks and throughput of each row, in percent."""
        axes, done = figure.subplots(), [r for r in rows if r.trials]
        gains = (
            ("more_planned", "blocks, planned"),
            ("more_measured", "blocks, as run"),
            ("more_throughput", "throughput"),
        )
        width = 0.8 / len(gains)
        for index, (key, label) in enumerate(gains):
            places = [place + (index - 1) * width for place in range(len(done))]
            means, spread = ([100 * (f(r, key) or 0.0) for r in done] for f in (ResultRow.mean, ResultRow.sd))
            style = {"label": label, "color": COLOURS[index + 1], "capsize": 2}
            bars(axes, places, means, width, spread, vertical=True, **style)
        axes.axhline(0, color="0.2", linewidth=0.6)
        axes.set_xticks(range(len(done)), [r.name for r in done])
        axes.set_ylabel("with the embedding on the host (%)")
        legend(figure, axes, ncols=3)


def _with_embedding_on_host(llm: LLM) -> LLM:
    """Returns an engine with the same weights and device memory, with its embedding on the host."""
    pool_bytes = llm.num_blocks * llm.block_bytes + llm.runner.params.embed.nbytes
    return with_changes(llm, embedding_device="host", num_blocks=pool_bytes // llm.block_bytes)


def _memory(on_device: LLM, on_host: LLM) -> dict[str, Any]:
    return {
        "block_bytes": on_device.block_bytes,
        "weights_bytes": on_device.memory_plan.weights_bytes,
        "embedding_bytes": on_device.memory_plan.weights_bytes - on_host.memory_plan.weights_bytes,
        "blocks_without": on_device.num_blocks,
        "blocks_with": on_host.num_blocks,
    }


def _planned(settings: HostEmbeddingSettings) -> dict[str, Any]:
    without, with_ = (_plan(settings, side) for side in ("device", "host"))
    return {
        "model": settings.planned_model,
        "device": settings.planned_device,
        "steps_compiled_for": without.alpha_from,
        "weights_bytes": without.weights_bytes,
        "embedding_bytes": with_.host_bytes,
        "blocks_without": without.max_kv_tokens // without.request.block_size,
        "blocks_with": with_.max_kv_tokens // with_.request.block_size,
        "requests_without": without.max_batch,
        "requests_with": with_.max_batch,
    }


def _plan(settings: HostEmbeddingSettings, embedding_device: str):
    from ksana_jax.runner.planner import plan

    model, dtype = settings.planned_model, settings.planned_dtype
    return plan(
        model,
        settings.planned_device,
        step=_step(model, dtype, embedding_device),
        dtype=dtype,
        context=settings.planned_context,
        embedding_device=embedding_device,
    )


@functools.cache
def _step(model: str, dtype: str, embedding_device: str):
    """Returns a compiled step's memory, cached for all devices and seeds."""
    from ksana_jax.runner.planner import measure_step
    from ksana_jax.runner.planner.solve import read_model

    config, _ = read_model(model)
    return measure_step(config, dtype=dtype, embedding_device=embedding_device)


def _planned_name(row: ResultRow) -> str:
    planned = next(m for m in row.trials[0] if m["metric"] == "planned")
    return planned["model"].rpartition("/")[2]


def _percent(value: float) -> str:
    return f"{100 * value:+.1f}"
