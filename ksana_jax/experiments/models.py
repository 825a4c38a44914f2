"""Looks up a model's path, training context, tokenizer and digest without loading it. No jax."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ksana_jax import checks
from ksana_jax.config import ConfigError
from ksana_jax.gguf_file import gguf_of, read_gguf
from ksana_jax.loading.config_json import read_json
from ksana_jax.loading.digest import digest_of_files
from ksana_jax.loading.gguf_config import hf_values
from ksana_jax.shipped import model_names, model_path


def model_dir(model: str) -> Path:
    """Returns the directory or the GGUF file of a model, given by path or by the name of a shipped model.

    Raises:
      FileNotFoundError: there is neither.
    """
    path = model_path(model)
    if (path / "config.json").is_file() or (path.exists() and gguf_of(path)):
        return path
    known = ", ".join(model_names())
    wanted = "a directory with a config.json or a .gguf file"
    raise FileNotFoundError(f"model {model!r} is not {wanted}; shipped models: {known}")


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

    return find_tokenizer(model_dir(model))


def _config(model: str) -> tuple[Path, dict[str, Any]]:
    """Returns the fields of a model's Hugging Face config, and where they are from."""
    path = model_dir(model)
    if (gguf := gguf_of(path)) is not None:
        return gguf, hf_values(read_gguf(gguf))
    path = path / "config.json"
    return path, read_json(path)


@functools.cache
def fingerprint(model: str, load_format: str = "auto") -> dict[str, str]:
    """Returns {"model": digest} of a model's files: config and tokenizer in full, weights by size, first and last MiB.

    After further training, the digest differs, so the model's trials run again.
    """
    return {"model": digest_of_files(model_dir(model), load_format)}
