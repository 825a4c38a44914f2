"""Looks up a model's training context, tokenizer, digest and commit without loading it. No jax."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.core.errors import LoadError
from ksana_jax.core.gguf_file import gguf_of, read_gguf
from ksana_jax.core.patterns import per_layer
from ksana_jax.core.sources import commit_of, model_path
from ksana_jax.core.statistics import read_statistics
from ksana_jax.engine.settings import beyond_training
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.groups import group_layers
from ksana_jax.lab.runs.tasks import task_named
from ksana_jax.loading.config_json import load_config, read_json
from ksana_jax.loading.digest import digest_of_files
from ksana_jax.loading.gguf_config import hf_values
from ksana_jax.loading.statistics import statistics_inputs
from ksana_jax.methods.eviction.window import Window
from ksana_jax.methods.full_heads import KIND
from ksana_jax.models.families import FAMILIES, SAME

# Suffix of inputs that record the origin of others, and do not define a trial.
COMMIT = "_commit"


@functools.cache
def training_context(model: str) -> int:
    """Returns the context length in tokens that the model was trained for, from its config."""
    path, context = _field(model, "max_position_embeddings")
    if problem := checks.integer("max_position_embeddings", context):
        raise ConfigError(f"{path}: {problem}; ${{context:...}} needs it")
    return context


def reader_notes(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns notes for readers of trials of quality whose sequences are longer than their model's training, or whose
    budgets leave the eviction method no token to choose."""
    found: dict[str | None, None] = {}
    small: dict[str | None, None] = {}
    for config in configs:
        with contextlib.suppress(ConfigError):  # of an invalid setting: the trial says more
            small[_without_choice(config["engine"])] = None
        task = task_named(config["task"])
        longest = task.max_model_len(task.Settings(**config["settings"])) or config["engine"]["max_model_len"]
        if not task.measures_speed and longest is not None:
            with contextlib.suppress(ConfigError, LoadError):  # of an unusable model: its engine says more
                found[beyond_training(model_config(config["model"]), longest)] = None
    return [*(f"Beyond training: {said}." for said in found if said), *filter(None, small)]


def _without_choice(engine: Mapping[str, Any]) -> str | None:
    """Returns a note if the tokens that always stay may fill a budget in tokens, so that scores choose none."""
    setting = engine["kv_eviction"]
    method = read_eviction(setting)
    if method is None or isinstance(method, Window) or isinstance(method.budget, float):
        return None
    recent = round(method.recent * method.budget) if isinstance(method.recent, float) else method.recent
    chosen = method.budget - method.sinks - recent
    if chosen >= (method.interval or engine["block_size"]):
        return None
    kept = f"of a budget of {method.budget} tokens, {method.sinks} sinks and {recent} newest always stay"
    return f"{setting['method']}: {kept}; its scores choose at most {max(chosen, 0)}, at times none."


@functools.cache
def num_layers(model: str) -> int | None:
    """Returns the model's number of layers from its config; None if it has none."""
    count = _field(model, "num_hidden_layers")[1]
    return count if isinstance(count, int) else None


@functools.cache
def model_config(model: str) -> ModelConfig:
    """Returns the configuration of a model."""
    return load_config(model_path(model, weights=False))


@functools.cache
def mixes_patterns(model: str) -> bool:
    """True if the model's own attention patterns divide its layers into several groups; False of an unusable model,
    about which its engine says more."""
    try:
        config = model_config(model)
    except (ConfigError, LoadError):
        return False
    return len(group_layers(per_layer(config.pattern, config.num_layers))) > 1


@functools.cache
def tokenizer_of(model: str) -> Any:
    """Loads a model's tokenizer; None if there is none."""
    from ksana_jax.tokenizers import find_tokenizer

    return find_tokenizer(model)


def _field(model: str, name: str) -> tuple[Path, Any]:
    """Returns the file that has a model's config, and a field of it by a Llama's name; None where it is absent."""
    path = model_path(model, weights=False)
    if (gguf := gguf_of(path)) is not None:
        return gguf, hf_values(read_gguf(gguf)).get(name)
    path = path / "config.json"
    values = read_json(path)
    kind = values.get("model_type")
    if not isinstance(kind, str) or (family := FAMILIES.get(SAME.get(kind, kind))) is None:
        return path, values.get(name)
    return path, values.get(family.fields.get(name) or name, family.defaults.get(name))


def fingerprint(model: str, load_format: str = "auto", key: str = "model") -> dict[str, str]:
    """Returns {key: digest} of a model's files, all bytes of them: a changed model's trials run again.

    For a model of the Hugging Face hub, {key}_commit is the commit.
    """
    path = model_path(model, weights=load_format != "dummy")
    commit = commit_of(path)
    return {key: digest_of_files(path, load_format)} | ({} if commit is None else {f"{key}{COMMIT}": commit})


def inputs_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns digests of a trial's model, and of the numbers about it that its methods read: see `ksana calibrate`."""
    model, load_format = config["model"], config["load_format"]
    path = model_path(model, weights=load_format != "dummy")
    methods = EngineConfig(**{name: config["engine"][name] for name in ("kv_eviction", "kv_cache_dtype")})
    found = {**fingerprint(model, load_format), **statistics_inputs(methods, path, load_format)}
    heads = (config["pattern"] or {}).get("full_heads")
    if isinstance(heads, Mapping) and heads["statistics"] is not None:
        statistics = read_statistics(heads["statistics"], KIND, digest_of_files(path, load_format))
        found |= {f"{KIND}_text": statistics.sha256[:16], f"{KIND}_numbers": statistics.digest}
    return found
