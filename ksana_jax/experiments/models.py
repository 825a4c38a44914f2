"""Looks up a model's directory, training context, tokenizer and digest without loading it. No jax."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ksana_jax import checks
from ksana_jax.config import ConfigError
from ksana_jax.loading.config_json import read_json
from ksana_jax.loading.digest import digest_of_files
from ksana_jax.shipped import model_names, model_path


def model_dir(model: str) -> Path:
    """Returns the directory of a model, given by path or by the name of a shipped model.

    Raises:
      FileNotFoundError: there is neither.
    """
    path = model_path(model)
    if (path / "config.json").is_file():
        return path
    known = ", ".join(model_names())
    raise FileNotFoundError(f"model {model!r} is not a directory with a config.json; shipped models: {known}")


@functools.cache
def training_context(model: str) -> int:
    """Returns the context length in tokens that the model was trained for, from its config.json."""
    path, config = _config(model)
    context: Any = config.get("max_position_embeddings")
    if problem := checks.integer("max_position_embeddings", context):
        raise ConfigError(f"{path}: {problem}; ${{context:...}} needs it")
    return context


@functools.cache
def num_layers(model: str) -> int | None:
    """Returns the model's number of layers from its config.json; None if it has none."""
    count = _config(model)[1].get("num_hidden_layers")
    return count if isinstance(count, int) else None


@functools.cache
def tokenizer_of(model: str) -> Any:
    """Loads the tokenizer in a model's directory; None if there is none."""
    from ksana_jax.tokenizers import find_tokenizer

    return find_tokenizer(model_dir(model))


def _config(model: str) -> tuple[Path, dict[str, Any]]:
    path = model_dir(model) / "config.json"
    return path, read_json(path)


@functools.cache
def fingerprint(model: str, load_format: str = "auto") -> dict[str, str]:
    """Returns {"model": digest} of a model's files: config and tokenizer in full, weights by size, first and last MiB.

    After further training, the digest differs, so the model's trials run again.
    """
    return {"model": digest_of_files(model_dir(model), load_format)}
