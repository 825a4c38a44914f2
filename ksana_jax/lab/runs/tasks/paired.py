"""Times two ways of serving the same work in alternating runs, so that other load affects both alike."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ksana_jax.core.config import ConfigError, EngineConfig
from ksana_jax.core.plugins import nearest
from ksana_jax.lab.runs.dotted import merge
from ksana_jax.lab.runs.tasks.base import BaseTask, TrialContext
from ksana_jax.lab.runs.tasks.results import Measurement

if TYPE_CHECKING:
    from ksana_jax import LLM, RequestOutput, SamplingParams

# Partner engines of an engine by key, kept as long as it: trials that share one also share its partners' steps.
_TWINS: weakref.WeakKeyDictionary[LLM, dict[str, LLM]] = weakref.WeakKeyDictionary()

Side = Literal["without", "with"]

# Maximum number of times a pair is run until it no longer compiles.
_MAX_ATTEMPTS = 4


class PairedTask(BaseTask):
    """Base of tasks that time two sides on requests of `prompt_tokens` and `output_tokens`, `num_pairs` times each."""

    def max_model_len(self, settings: Any) -> int:
        return settings.prompt_tokens + settings.output_tokens

    def measure(
        self, trial: TrialContext, without: Callable[[str], Measurement], with_: Callable[[str], Measurement]
    ) -> Iterator[Measurement]:
        """Yields the runs of both sides, see `pairs`, and reports how many are done."""
        num_pairs = trial.config["settings"]["num_pairs"]
        for done, measurement in enumerate(pairs(without, with_, num_pairs, trial.seed), start=1):
            yield measurement
            trial.progress(done / (2 * num_pairs))


def check_no_shared_folder(config: Mapping[str, Any]) -> None:
    if config["engine"]["disk_cache_dir"] is not None:
        raise ConfigError("engine.disk_cache_dir is set, must be null: two engines cannot share a folder")


def check_against(config: Mapping[str, Any], against: Mapping[str, Any]) -> None:
    """Raises ConfigError unless `against` are settings of an engine that can be compared with a trial's."""
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in against:
        if name not in names:
            raise ConfigError(f"settings.against.{name}: no such setting; the nearest is {nearest(name, names)!r}")
    check_no_shared_folder(config)
    EngineConfig(**merge(config["engine"], against))


def other_engine(trial: TrialContext, against: Mapping[str, Any]) -> LLM:
    """Returns an engine with the settings `against` instead of the trial's own."""
    from ksana_jax import LLM

    llm, config = trial.llm, trial.config
    sinks = {"max_repositioned_sinks": llm.config.max_repositioned_sinks}
    settings = merge(config["engine"], sinks, against)

    def make() -> LLM:
        return LLM(config["model"], load_format=config["load_format"], pattern=llm.patterns, **settings)

    return twin(llm, json.dumps(settings, sort_keys=True), make)


def twin(llm: LLM, key: str, make: Callable[[], LLM], *, newest_only: bool = False) -> LLM:
    """Returns another engine to compare an engine with, which gets the same patterns.

    Args:
      make: opens it, unless the engine has one of this key already. newest_only: drops engines of other keys first.
    """
    known = _TWINS.setdefault(llm, {})
    if key not in known:
        if newest_only:
            known.clear()
        known[key] = make()
    known[key].set_pattern(llm.patterns)
    return known[key]


def with_changes(llm: LLM, **changes: Any) -> LLM:
    """Returns an engine with the same weights, and settings that differ from an engine's by some changes."""
    from ksana_jax import LLM

    settings = dataclasses.asdict(llm.config) | changes
    given = {"pattern": llm.patterns, "tokenizer": llm.tokenizer}
    return LLM.from_params(llm.model_config, llm.runner.params, **given, **settings)


def timed(llm: LLM, prompts: Sequence[Mapping[str, Any]], params: Sequence[SamplingParams]) -> Measurement:
    """Serves prompts that all arrive at once; see `timed_work`."""
    return timed_work(llm, lambda: llm.generate(list(prompts), list(params)))


def timed_work(llm: LLM, work: Callable[[], list[RequestOutput]]) -> Measurement:
    """Measures seconds, tokens, steps, blocks and prefix cache hits of an engine that serves the requests of `work`.

    cpu_seconds: of all threads of this process, which other programs lengthen less than seconds.
    hit_rate: fraction of the prompt tokens found in the cache. ttft_s: mean over requests. mean_blocks, mean_unshared:
    blocks held within a step, and those that its running rows would hold without sharing, mean over steps.
    peak_blocks, peak_unshared: both counts in the step with the highest unshared count.
    """
    llm.clear_records()
    compiled, began, cpu_began = llm.num_compilations, time.perf_counter(), time.process_time()
    outputs = [output.check() for output in work()]
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    records = list(llm.records)
    peak = max(records, key=lambda r: r.unshared_blocks)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "compiled_while_timed": llm.num_compilations - compiled,
        "num_requests": len(outputs),
        "num_output_tokens": sum(len(c.token_ids) for o in outputs for c in o.outputs),
        "num_computed_tokens": sum(int(r.num_tokens) for r in records),
        "num_steps": len(records),
        "num_preemptions": sum(o.metrics.num_preemptions for o in outputs),
        "mean_running": statistics.fmean(int(r.num_running) for r in records),
        "mean_blocks": statistics.fmean(int(r.peak_blocks) for r in records),
        "mean_unshared": statistics.fmean(int(r.unshared_blocks) for r in records),
        "peak_blocks": int(peak.peak_blocks),
        "peak_unshared": int(peak.unshared_blocks),
        "num_blocks": llm.num_blocks,
        "hit_rate": sum(o.num_cached_tokens for o in outputs) / sum(len(o.prompt_token_ids) for o in outputs),
        "ttft_s": statistics.fmean(o.metrics.ttft_s or 0.0 for o in outputs),
    }


def pairs(
    without: Callable[[str], Measurement], with_: Callable[[str], Measurement], num_pairs: int, seed: int
) -> Iterator[Measurement]:
    """Runs both sides in pairs, alternating which goes first; a pair that compiled something is run again.

    Args:
      without, with_: called with a cache salt that is unique to the run, so that it finds nothing of earlier runs.
    """
    serve: dict[Side, Callable[[str], Measurement]] = {"without": without, "with": with_}
    for pair in range(num_pairs):
        order: list[Side] = ["without", "with"] if (pair + seed) % 2 == 0 else ["with", "without"]
        runs: list[Measurement] = []
        for _ in range(_MAX_ATTEMPTS):
            runs = [{"metric": "run", "pair": pair, "side": side, **serve[side](_salt())} for side in order]
            if not any(run["compiled_while_timed"] for run in runs):
                break
        yield from runs


def _salt() -> str:
    return uuid.uuid4().hex


def of_side(measurements: Sequence[Measurement], side: Side) -> list[Measurement]:
    """Returns the runs of one side, in the order of pairs."""
    runs = [m for m in measurements if m["metric"] == "run" and m["side"] == side]
    return sorted(runs, key=lambda m: m["pair"])


def speeds(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Computes speeds: "gain", the median over pairs of seconds without / seconds with; median tokens and requests per
    second of each side; and compilations while timing."""
    without, with_ = of_side(measurements, "without"), of_side(measurements, "with")
    result = {"gain": statistics.median(a["seconds"] / b["seconds"] for a, b in zip(without, with_, strict=True))}
    for side, runs in (("without", without), ("with", with_)):
        for name, count in (("tokens_per_s", "num_output_tokens"), ("requests_per_s", "num_requests")):
            result[f"{name}_{side}"] = statistics.median(m[count] / m["seconds"] for m in runs)
        for name in ("ttft_s", "num_preemptions", "mean_running", "num_computed_tokens", "num_steps"):
            result[f"{name}_{side}"] = statistics.median(m[name] for m in runs)
    result["compiled_while_timed"] = sum(m["compiled_while_timed"] for m in (*without, *with_))
    return result
