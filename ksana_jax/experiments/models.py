"""What an experiment needs to know of a model before it is loaded: where it is, its context, its digest. No jax."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from ksana_jax import checks
from ksana_jax.config import ConfigError
from ksana_jax.files import open_to_read
from ksana_jax.shipped import model_names, model_path

_SAMPLE_BYTES = 2**20


def model_dir(model: str) -> Path:
    """The directory of a model given by path or by the name of a shipped one.

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
    """Tokens of the context that the model was trained for, from its config.json."""
    path, config = _config(model)
    context: Any = config.get("max_position_embeddings")
    if problem := checks.integer("max_position_embeddings", context):
        raise ConfigError(f"{path}: {problem}; ${{context:...}} needs it")
    return context


@functools.cache
def num_layers(model: str) -> int | None:
    """Layers of the model, from its config.json; None where that does not say."""
    count = _config(model)[1].get("num_hidden_layers")
    return count if isinstance(count, int) else None


@functools.cache
def tokenizer_of(model: str) -> Any:
    """The tokenizer in a model's directory; None where there is none."""
    from ksana_jax.tokenizers import load_tokenizer

    path = model_dir(model)
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    return load_tokenizer(path)


def _config(model: str) -> tuple[Path, dict[str, Any]]:
    path = model_dir(model) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: holds {type(config).__name__}, must be a JSON object")
    return path, config


@functools.cache
def fingerprint(model: str, load_format: str = "auto") -> dict[str, str]:
    """{"model": digest} of a model's files: config and tokenizer whole, weights by size, first and last MiB.

    A model that was trained further is another model: its trials run again.
    """
    digest = hashlib.sha256()
    weights = (".safetensors",)
    for path in sorted(model_dir(model).iterdir()):
        if path.suffix not in (".json", ".model", ".jinja", *weights):
            continue
        if path.suffix in weights and load_format == "dummy":
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open_to_read(path) as file:
            if path.suffix in weights and size > 2 * _SAMPLE_BYTES:
                digest.update(file.read(_SAMPLE_BYTES))
                file.seek(-_SAMPLE_BYTES, 2)
            digest.update(file.read())
    return {"model": digest.hexdigest()[:16]}
