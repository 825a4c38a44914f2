"""Looks up a model's training context, tokenizer, digest and commit without loading it. No jax."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError
from ksana_jax.core.gguf_file import gguf_of, read_gguf
from ksana_jax.core.sources import commit_of, model_path
from ksana_jax.loading.config_json import read_json
from ksana_jax.loading.digest import digest_of_files
from ksana_jax.loading.gguf_config import hf_values

# Suffix of inputs that record the origin of others, and do not define a trial.
COMMIT = "_commit"


@functools.cache
def training_context(model: str) -> int:
    """Returns the context length in tokens that the model was trained for, from its config."""
    path, config = _config(model)
    context: Any = config.get("max_position_embeddings")
    if problem := checks.integer("max_position_embeddings", context):
        raise ConfigError(f"{path}: {problem}; ${{context:...}} needs it")
    return context


@functools.cache
def num_layers(model: str) -> int | None:
    """Returns the model's number of layers from its config; None if it has none."""
    count = _config(model)[1].get("num_hidden_layers")
    return count if isinstance(count, int) else None


@functools.cache
def tokenizer_of(model: str) -> Any:
    """Loads a model's tokenizer; None if there is none."""
    from ksana_jax.tokenizers import find_tokenizer

    return find_tokenizer(model)


def _config(model: str) -> tuple[Path, dict[str, Any]]:
    """Returns the fields of a model's Hugging Face config, and their source."""
    path = model_path(model, weights=False)
    if (gguf := gguf_of(path)) is not None:
        return gguf, hf_values(read_gguf(gguf))
    path = path / "config.json"
    return path, read_json(path)


@functools.cache
def fingerprint(model: str, load_format: str = "auto", key: str = "model") -> dict[str, str]:
    """Returns {key: digest} of a model's files: config and tokenizer in full, weights by size, first and last MiB.

    After further training, the digest differs, so the model's trials run again. For a model of the Hugging Face hub,
    {key}_commit is the commit.
    """
    path = model_path(model, weights=load_format != "dummy")
    commit = commit_of(path)
    return {key: digest_of_files(path, load_format)} | ({} if commit is None else {f"{key}{COMMIT}": commit})
