"""An ahead-of-time trace for a target that is not attached: compiled steps and their computed bounds."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ksana_jax.core.compilation_cache import without_cache
from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.devices.capabilities import stored_as_bits
from ksana_jax.devkit.compile_check.targets import Target, find_target
from ksana_jax.kv.engine_layout import make_layout
from ksana_jax.lab.experiments.config import Plan, Trial
from ksana_jax.lab.experiments.patterns import patterns_of
from ksana_jax.lab.trace.bundle import write_summary
from ksana_jax.lab.trace.functions import CompilationLog, Function, name_of
from ksana_jax.lab.trace.header import architecture
from ksana_jax.lab.trace.roofline import Roofline, roofline
from ksana_jax.loading.config_json import load_config
from ksana_jax.loading.load import abstract_params
from ksana_jax.methods.presets import read_patterns
from ksana_jax.runner.planner.chips import CHIPS
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.step.buckets import Buckets
from ksana_jax.scheduler.step.types import StepShape
from ksana_jax.sharding.shares import local_layout, local_model


def engines_of(plan: Plan) -> list[list[Trial]]:
    """Returns the trials of each engine that an experiment needs, one for each pattern."""
    engines: dict[str, dict[str, Trial]] = {}
    for trial in plan.trials:
        engines.setdefault(trial.engine_key, {}).setdefault(str(patterns_of(trial.config)), trial)
    return [list(trials.values()) for trials in engines.values()]


def compile_engine(
    plan: Plan, trials: Sequence[Trial], target: Target, log: CompilationLog, number: int
) -> dict[str, Any]:
    """Compiles the largest steps of an engine; returns them with their bounds, as plain values.

    Args:
      trials: that share the engine, and differ in their patterns: a step has bounds for each.

    Raises:
      ConfigError: the engine evicts, so how much a step reads is not known; or it has no max_model_len that fits.
    """
    trial = trials[0]
    given = trial.config
    model = load_config(given["model"])
    patterns = layer_patterns(trial, model)
    sinks = plan.max_repositioned_sinks(trial)
    config = EngineConfig(
        **{"max_repositioned_sinks": sinks, **{k: v for k, v in given["engine"].items() if v is not None}}
    )
    config = config.for_model(model, patterns)
    for name in ("kv_eviction", "kv_selection"):
        if getattr(config, name) is not None:
            raise ConfigError(f"{trial.label}: bounds are not known for an engine with {name}")
    if config.dtype == "auto":
        raise ConfigError("dtype is auto, must be given for a target that is not attached: engine.dtype=bf16")
    if config.operators.prefer != "speed":
        raise ConfigError(
            f"operators.prefer is {config.operators.prefer!r}, must be speed: nothing was measured on an absent machine"
        )
    assert config.max_model_len is not None and config.max_repositioned_sinks is not None
    layout, num_devices = (
        make_layout(model, patterns, config, stored_as_bits(target.device)),
        config.tensor_parallel_size,
    )
    local, of_device = local_model(model, num_devices), local_layout(layout, num_devices)
    num_blocks = config.num_blocks or config.max_num_seqs * -(-config.max_model_len // config.block_size)
    runner = Runner(
        model,
        abstract_params(model, config.dtype, config.quantization),
        patterns,
        layout=layout,
        num_blocks=num_blocks,
        max_model_len=config.max_model_len,
        max_repositioned_sinks=config.max_repositioned_sinks,
        settings=config.operators,
        numerics=config.numerics,
        embedding_device=config.embedding_device,
        placement=target.placement(num_devices),
    )
    steps = []
    for shape in shapes_of(config, target.platform):
        known = len(log.functions)
        with target.described(num_devices):
            runner.compile_step(shape)
        for function in log.functions[known:]:
            function.engine = number
        context = min(config.max_model_len, shape.table_width * config.block_size)
        bounds = functools.partial(
            roofline,
            local,
            shape,
            CHIPS[target.name],
            dtype=config.dtype,
            quantization=config.quantization,
            kv_token_bytes=of_device.token_bytes,
            context=context,
        )
        new = log.functions[known:]
        steps += [plain_step(shape, t.label, context, bounds(layer_patterns(t, model)), new) for t in trials]
    return {
        "engine": number,
        **architecture(model),
        "implementation": runner.implementation.name,
        "platform": target.platform,
        "num_devices": num_devices,
        "memory_bytes": target.memory_bytes,
        "patterns": "; ".join(t.label for t in trials),
        "num_blocks": num_blocks,
        "block_bytes": of_device.block_bytes,
        "config": config.plain(),
        "steps": steps,
    }


def layer_patterns(trial: Trial, model: ModelConfig) -> tuple[AttentionPattern, ...]:
    """Returns the pattern of each layer in a trial."""
    asked = patterns_of(trial.config)  # none, one for all layers, or one for each
    return read_patterns(asked if len(asked) > 1 else asked[0] if asked else None, model)


def plain_step(
    shape: StepShape, label: str, context: int, bound: Roofline, functions: Sequence[Function]
) -> dict[str, Any]:
    """Returns a compiled step and its bounds as plain values; times are computed, not measured."""
    found = dataclasses.asdict(bound) | {"computed_s": bound.seconds, "bound": bound.bound}
    programs = [p for f in functions for p in f.programs]
    of_memory = {
        key: max((p.memory.get(key, 0) for p in programs), default=0) for key in ("argument_bytes", "temp_bytes")
    }
    crossing = [c | {"number": c["number"] * p.calls} for p in programs for c in p.collectives]
    compile_s = sum(f.traced_s + f.compiled_s for f in functions)
    return {
        "name": name_of(shape),
        "label": label,
        "context": context,
        **of_memory,
        "collectives": crossing,
        "compile_s": compile_s,
        **found,
    }


def shapes_of(config: EngineConfig, platform: str) -> list[StepShape]:
    """Returns the steps that are compiled: a decode of all rows, and the largest steps with chunks of prompts."""
    buckets = Buckets.of(config, platform)
    return [buckets.shape(config.max_num_seqs, (), buckets.widths[-1]), *buckets.largest()]


def trace_absent(plan: Plan, name: str, folder: Path, command: str, say: Callable[[str], None]) -> None:
    """Compiles the engines of an experiment for a target that is not attached, and writes the bundle.

    Args:
      name: of the target. say: called with a line for each engine.

    Raises:
      ConfigError: see `targets.check_target` and `compile_engine`.
    """
    target, log, began = find_target(name), CompilationLog(folder / "functions"), time.time()
    with without_cache(), log:
        engines = []
        for number, trials in enumerate(engines_of(plan), 1):
            say(f"compiling the steps of {trials[0].label} for {CHIPS[name].name}")
            engines.append(compile_engine(plan, trials, target, log, number))
    chip = dataclasses.asdict(CHIPS[name])
    write_summary(folder, command, began, log, target={"name": name, "chip": chip}, engines=engines)
