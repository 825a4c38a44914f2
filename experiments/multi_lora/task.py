"""Several adapters in one engine, compared with one model per adapter in the same bytes.

Requests name adapters with probabilities of a Zipf distribution, and arrive at once. "with" serves them together:
`max_loras` adapters have slots on the device, others wait for one. "without" has a model of its own for each adapter,
its weights merged, of which the bytes of the device hold one, with the slots' bytes for more blocks: it serves the
requests of one adapter after the other, and changes the weights from host memory between them. The values of its
weights change no time, so those of the model itself stand for all.

Source of the question: S-LoRA, arXiv:2311.03285, section 7.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs import texts
from ksana_jax.lab.runs.asking import forced
from ksana_jax.lab.runs.tasks.base import TrialContext, float_field, int_field
from ksana_jax.lab.runs.tasks.paired import PairedTask, of_side, other_engine, speeds, timed_work
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, compilation_note, number, percent

if TYPE_CHECKING:
    from ksana_jax import LLM, LoRARequest
    from ksana_jax.core.outputs import RequestOutput


@dataclasses.dataclass
class MultiLoraSettings:
    """Fields of `settings` in the YAML file.

    num_adapters: adapters that requests choose from, random, of rank `engine.max_lora_rank`.
    skew: exponent s of their popularity; the k-th has a probability in proportion to k^-s. 0: all have the same.
    num_requests: requests, all submitted at the start.
    prompt_tokens, output_tokens: of each request, regardless of EOS.
    num_pairs: timed runs of each side.
    """

    num_adapters: int = int_field(16)
    skew: float = float_field(1.0, low=0)
    num_requests: int = int_field(64)
    prompt_tokens: int = int_field(32)
    output_tokens: int = int_field(32)
    num_pairs: int = int_field(1)


class MultiLora(PairedTask):
    """The task of this study. See the module's docstring."""

    Settings = MultiLoraSettings

    def check(self, config: Mapping[str, Any]) -> None:
        if not config["engine"]["enable_lora"]:
            raise ConfigError("engine.enable_lora is false, must be true")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        from ksana_jax.loading import load_model
        from ksana_jax.models.adapted import adapter_bytes

        config, llm = trial.config, trial.llm
        settings, engine = MultiLoraSettings(**config["settings"]), llm.config
        prompts = texts.prompts_for(llm, [], settings.num_requests, settings.prompt_tokens, trial.seed)
        chances = np.arange(1, settings.num_adapters + 1) ** -settings.skew
        rng = np.random.default_rng(trial.seed)
        chosen = rng.choice(settings.num_adapters, settings.num_requests, p=chances / chances.sum()).tolist()
        itemsize = llm.runner.params.final_norm.dtype.itemsize
        of_slots = adapter_bytes(llm.model_config, engine.max_loras, engine.max_lora_rank, itemsize)
        no_adapters = {"enable_lora": False, "max_loras": 1, "max_cpu_loras": None}
        more = {"num_blocks": llm.num_blocks + of_slots // llm.block_bytes}
        one = other_engine(trial, {**no_adapters, **more})
        _, weights = load_model(config["model"], dtype=engine.dtype, load_format=config["load_format"])
        with tempfile.TemporaryDirectory() as folder:
            adapters = _adapters(llm, Path(folder), settings.num_adapters)
            slots = llm.engine.factory.adapters.slots  # pyright: ignore[reportOptionalMemberAccess]

            def together(salt: str) -> Measurement:
                slots.clear()
                before = slots.num_writes
                asked = [adapters[index] for index in chosen]
                found = timed_work(llm, lambda: llm.generate(*_requests(prompts, settings, salt), lora_request=asked))
                return {**found, "num_writes": slots.num_writes - before}

            def apart(salt: str) -> Measurement:
                waits: list[float] = []
                found = timed_work(one, lambda: _in_turn(one, weights, chosen, prompts, settings, salt, waits))
                return {**found, "ttft_s": float(np.mean(waits)), "num_writes": len(set(chosen))}

            yield {
                "metric": "setting",
                "slots": engine.max_loras,
                "num_used": len(set(chosen)),
                "slots_bytes": of_slots,
            }
            yield from self.measure(trial, apart, together)

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes hit_rate, the fraction of requests whose adapter had a slot; num_used, the adapters that any request
        names; gain, seconds without / seconds with; and speeds of both sides."""
        setting = next(m for m in measurements if m["metric"] == "setting")
        runs = of_side(measurements, "with")
        hits = [1 - m["num_writes"] / m["num_requests"] for m in runs]
        return {**speeds(measurements), "hit_rate": sum(hits) / len(hits), "num_used": setting["num_used"]}

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("num_used", "adapters asked for", number(0), exact=True),
            Column("hit_rate", "slot hits, %", percent(), "max"),
            Column("mean_running_with", "rows at once", number(1)),
            Column("mean_running_without", "rows at once apart", number(1)),
            Column("tokens_per_s_with", "tokens/s", number(0), "max"),
            Column("tokens_per_s_without", "tokens/s apart", number(0)),
            Column("ttft_s_with", "TTFT, s", number(2), "min"),
            Column("ttft_s_without", "TTFT apart, s", number(2)),
            Column("gain", "gain, ×", number(2), "max"),
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        return [
            "Slot hits: requests whose adapter had a slot when they began; slots are empty at the start.",
            "Apart: one merged model after the other in the same bytes, each change of weights from host memory "
            "included. TTFT: mean over requests, all of which arrive at the start.",
            *compilation_note(rows),
        ]


def _adapters(llm: LLM, folder: Path, count: int) -> list[LoRARequest]:
    """Writes random adapters, and reads them into host memory."""
    from experiments.training.adapter_export import export_adapter, random_adapter
    from ksana_jax import LoRARequest

    found, rank = [], llm.config.max_lora_rank
    for number_ in range(count):
        path = folder / str(number_)
        export_adapter(path, random_adapter(llm.model_config, rank, number_), rank, rank)
        found.append(LoRARequest(path.name, 1 + number_, str(path)))
        llm.engine.factory.adapters.use(found[-1])  # pyright: ignore[reportOptionalMemberAccess]
    return found


def _requests(prompts: Sequence[Any], settings: MultiLoraSettings, salt: str) -> tuple[list[Any], list[Any]]:
    given = [{"prompt_token_ids": ids, "cache_salt": salt} for ids in prompts]
    return given, [forced(settings.output_tokens, temperature=0.0)] * len(prompts)


def _in_turn(
    llm: LLM,
    weights: Any,
    chosen: Sequence[int],
    prompts: Sequence[Any],
    settings: MultiLoraSettings,
    salt: str,
    waits: list[float],
) -> list[RequestOutput]:
    """Serves the requests of each adapter, the most popular first, after a change of the weights.

    waits: gets the seconds that each request waits for its first token.
    """
    began, outputs = time.perf_counter(), []
    for index, _ in Counter(chosen).most_common():
        llm.update_weights(weights)
        waited = time.perf_counter() - began
        own = [ids for ids, of in zip(prompts, chosen, strict=True) if of == index]
        found = llm.generate(*_requests(own, settings, salt))
        waits += [waited + (output.metrics.ttft_s or 0.0) for output in found]
        outputs += found
    return outputs
