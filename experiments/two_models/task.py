"""Two models in one budget of device memory, compared with two fixed halves of it.

Chats come in phases, and each phase favours one of the models. "with": pools move within the budget, see
`engine.model_memory`. "without": each model has half of the blocks for itself. Only the sizes of the pools differ, so a
model's weights may be random, and both models may be the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs import texts
from ksana_jax.lab.runs.asking import forced
from ksana_jax.lab.runs.tasks.base import TrialContext, float_field, int_field
from ksana_jax.lab.runs.tasks.paired import PairedTask, check_no_shared_folder, of_side, speeds, twin
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, compilation_note, number, percent

if TYPE_CHECKING:
    from ksana_jax import LLM, RequestOutput
    from ksana_jax.engine.async_llm import AsyncLLM


@dataclasses.dataclass
class TwoModelsSettings:
    """Fields of `settings` in the YAML file, whose `engine.num_blocks` both models have together.

    other_model: directory or name of the second model; null takes the first again, with other random weights.
    swing: fraction of a phase's chats with the model that it favours, the first one in the first phase.
    num_phases: phases, one after the other.
    gap_s: seconds without requests before each of them.
    num_chats: chats of a phase, all at once, which later phases do not continue.
    num_turns: of a chat. A turn sends the chat so far and more tokens.
    prompt_tokens: of the first turn.
    more_tokens: of each later one.
    output_tokens: of each answer, regardless of EOS.
    sleep_after: seconds without a request after which a model sleeps.
    num_pairs: timed runs of each side.
    """

    other_model: str | None = None
    swing: float = float_field(1.0, low=0.5, high=1)
    num_phases: int = int_field(4)
    gap_s: float = float_field(1.5, low=0)
    num_chats: int = int_field(12)
    num_turns: int = int_field(3)
    prompt_tokens: int = int_field(128)
    more_tokens: int = int_field(32)
    output_tokens: int = int_field(32)
    sleep_after: float = float_field(0.5, above=0)
    num_pairs: int = int_field(1)


class TwoModels(PairedTask):
    """The task of this study. See the module's docstring."""

    Settings = TwoModelsSettings

    def max_model_len(self, settings: TwoModelsSettings) -> int:
        more = settings.more_tokens + settings.output_tokens
        return settings.prompt_tokens + settings.output_tokens + (settings.num_turns - 1) * more

    def check(self, config: Mapping[str, Any]) -> None:
        if config["engine"]["num_blocks"] is None:
            raise ConfigError("engine.num_blocks is null, must be the blocks of both models together")
        check_no_shared_folder(config)

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        config, llm = trial.config, trial.llm
        settings, num_blocks = TwoModelsSettings(**config["settings"]), config["engine"]["num_blocks"]
        whole = [llm, _engine(trial, settings, 1, num_blocks)]
        halves = [_engine(trial, settings, number, num_blocks // 2) for number in (0, 1)]
        chats = [_chats(settings, model, trial.seed) for model in whole]

        def serve(llms: list[LLM], shared: bool, salt: str) -> Measurement:
            for model in (*whole, *halves):
                model.sleep()
                model.clear_records()
            if not shared:
                for model in llms:
                    model.wake_up()
            return asyncio.run(_serve(llms, chats, settings, salt, shared))

        in_halves, in_turn = functools.partial(serve, halves, False), functools.partial(serve, whole, True)
        yield from self.measure(trial, in_halves, in_turn)

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes gain, seconds without / seconds with, the gaps between phases included; for each side speeds,
        hit_rate and slowest_s, the longest wait for a first token; and moves_s, of falling asleep and waking."""
        result = speeds(measurements)
        for side in ("without", "with"):
            runs = of_side(measurements, side)
            for name in ("hit_rate", "slowest_s", "moves_s"):
                result[f"{name}_{side}"] = statistics.median(m[name] for m in runs)
        return result

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("hit_rate_without", "prefix hits in halves, %", percent()),
            Column("hit_rate_with", "prefix hits, %", percent(), "max"),
            Column("ttft_s_without", "TTFT in halves, s", number(2)),
            Column("ttft_s_with", "TTFT, s", number(2), "min"),
            Column("slowest_s_without", "longest TTFT in halves, s", number(1)),
            Column("slowest_s_with", "longest TTFT, s", number(1), "min"),
            Column("moves_s_with", "pools moving, s", number(1)),
            Column("tokens_per_s_without", "tokens/s in halves", number(0)),
            Column("tokens_per_s_with", "tokens/s", number(0), "max"),
            Column("gain", "gain, ×", number(2), "max"),
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        return [
            "In halves: each model has half of the blocks. Otherwise both share them, and pools move.",
            "Prefix hits: prompt tokens that were found in the cache. TTFT: mean over requests, waking included.",
            "tokens/s: output tokens, over all seconds but the gaps between phases. Gain: seconds in halves / seconds.",
            *compilation_note(rows),
        ]


def _engine(trial: TrialContext, settings: TwoModelsSettings, number: int, num_blocks: int) -> LLM:
    """Returns an engine of the first or second model with the trial's settings and as many blocks."""
    from ksana_jax import LLM

    name = (settings.other_model if number else None) or trial.config["model"]
    engine = {**trial.config["engine"], "seed": trial.config["engine"]["seed"] + number, "num_blocks": num_blocks}
    more = {"load_format": trial.config["load_format"], "max_model_len": trial.llm.engine.max_model_len}
    return twin(trial.llm, f"two_models {name} {number} {num_blocks}", lambda: LLM(name, **engine | more))


def _chats(settings: TwoModelsSettings, llm: LLM, seed: int) -> list[list[list[list[int]]]]:
    """Returns the tokens that turns add, [phase][chat][turn]; each model gets as many chats as a phase has."""
    texts_of = functools.partial(texts.random_prompts, llm, settings.num_chats)
    lengths = [settings.prompt_tokens, *[settings.more_tokens] * (settings.num_turns - 1)]
    found = []
    for phase in range(settings.num_phases):
        first = seed + 1000 * phase
        turns = [texts_of(length, first + turn) for turn, length in enumerate(lengths)]
        found.append([list(chat) for chat in zip(*turns, strict=True)])
    return found


async def _serve(
    llms: Sequence[LLM],
    chats: Sequence[Sequence[Sequence[Sequence[Sequence[int]]]]],
    settings: TwoModelsSettings,
    salt: str,
    shared: bool,
) -> Measurement:
    """Serves all phases. shared: the models sleep for each other in one budget."""
    from ksana_jax.engine.async_llm import AsyncLLM
    from ksana_jax.engine.model_memory import ModelMemoryManager, footprint

    compiled, engines = sum(llm.num_compilations for llm in llms), [AsyncLLM.around(llm) for llm in llms]
    residents = None
    if shared:
        sizes = [footprint(llm, 1) for llm in llms]
        num_bytes = max(sizes[0].awake + sizes[1].asleep, sizes[1].awake + sizes[0].asleep)
        residents = ModelMemoryManager(num_bytes)
        for engine in engines:
            engine.sleep_when_idle(settings.sleep_after, 1, residents)
    try:
        seconds, answers = 0.0, []
        for phase in range(settings.num_phases):
            await asyncio.sleep(settings.gap_s)
            favoured = round(settings.swing * settings.num_chats)
            counts = (favoured, settings.num_chats - favoured)[:: 1 if phase % 2 == 0 else -1]
            began = time.perf_counter()
            talks = [
                _talk(engine, chat, settings, salt)
                for engine, of_model, count in zip(engines, chats, counts, strict=True)
                for chat in of_model[phase][:count]
            ]
            for found in await asyncio.gather(*talks):
                answers += found
            seconds += time.perf_counter() - began
    finally:
        for engine in engines:
            await engine.aclose()
    outputs = [output for _, output in answers]
    waits = [wait for wait, _ in answers]
    records = [record for llm in llms for record in llm.records]
    return {
        "seconds": seconds,
        "compiled_while_timed": sum(llm.num_compilations for llm in llms) - compiled,
        "num_requests": len(outputs),
        "num_output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "num_computed_tokens": sum(int(record.num_tokens) for record in records),
        "num_steps": len(records),
        "mean_running": statistics.fmean(int(record.num_running) for record in records),
        "num_preemptions": sum(output.metrics.num_preemptions for output in outputs),
        "hit_rate": sum(o.num_cached_tokens for o in outputs) / sum(len(o.prompt_token_ids) for o in outputs),
        "ttft_s": statistics.fmean(waits),
        "slowest_s": max(waits),
        "moves_s": 0.0 if residents is None else residents.moves_s,
    }


async def _talk(
    llm: AsyncLLM, turns: Sequence[Sequence[int]], settings: TwoModelsSettings, salt: str
) -> list[tuple[float, RequestOutput]]:
    """Holds a chat; returns each turn's seconds to the first token, and its last output."""
    text: list[int] = []
    found = []
    for more in turns:
        text += more
        sent, first, output = time.perf_counter(), None, None
        prompt = {"prompt_token_ids": list(text)}
        asked = forced(settings.output_tokens, temperature=0.0)
        async for output in llm.generate(prompt, asked, cache_salt=salt):  # noqa: B007  the last one is read below
            first = time.perf_counter() - sent if first is None else first
        assert output is not None and first is not None
        found.append((first, output.check()))
        text += output.outputs[0].token_ids
    return found
