"""Reads a model's configuration from `config.json` and `generation_config.json`, or a GGUF file. Knows no arrays."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, Protocol

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.gguf_file import gguf_of, read_gguf
from ksana_jax.core.sources import model_path
from ksana_jax.loading.gguf_config import gguf_config
from ksana_jax.loading.hints import folder_hint
from ksana_jax.loading.quantised.scheme import read_scheme
from ksana_jax.models.families import config_from_hf

logger = logging.getLogger("ksana_jax")
# Far above any real config or shard index; larger files are not read.
MAX_JSON_BYTES = 16 * 2**20


class SizedTokenizer(Protocol):
    """The part of a tokenizer that `check_tokenizer` uses."""

    @property
    def vocab_size(self) -> int: ...


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      ConfigError: the file is missing, too large or not a JSON object.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is missing or not a file")
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise ConfigError(f"{path} has {size:,} bytes; supported: at most {MAX_JSON_BYTES:,}")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}; must be a JSON object")
    return values


def load_config(model: str | os.PathLike[str]) -> ModelConfig:
    """Reads the configuration of a model, given by path or name; see `core.sources.model_path` and `gguf_of`.

    BOS comes from generation_config.json if a directory's file names it. EOS ids are the union of both files',
    generation_config.json first; an engine adds the tokenizer's.

    Raises:
      LoadError: the model does not exist, or a GGUF file is damaged.
      ConfigError: fields are invalid or unsupported; one line names the file and all of them.
    """
    path = model_path(model, weights=False)
    if (gguf := gguf_of(path)) is not None:
        return gguf_config(read_gguf(gguf))
    source, generation = path / "config.json", path / "generation_config.json"
    if not source.is_file() and (hint := folder_hint(path)):
        raise ConfigError(f"{source} is missing{hint}")
    values, given = read_json(source), read_generation(generation)
    read_scheme(values, str(source))  # says now what is not supported
    ids = {name: given[name] for name in ("bos_token_id", "eos_token_id") if given.get(name) is not None}
    if not ids:
        return config_from_hf(values, str(source))
    if "eos_token_id" in ids:
        first = listed(ids["eos_token_id"])
        ids["eos_token_id"] = first + [i for i in listed(values.get("eos_token_id")) if i not in first]
    return config_from_hf({**values, **ids}, f"{source} with ids from {generation.name}")


def read_generation(path: Path) -> dict[str, Any]:
    """Reads a generation_config.json; {} if it is missing, or empty, as some conversions leave it."""
    return read_json(path) if path.exists() and path.stat().st_size else {}


def listed(ids: Any) -> list[Any]:
    """Returns the ids of a config's field: one id, a list or null."""
    return list(ids) if isinstance(ids, list) else [] if ids is None else [ids]


def check_tokenizer(config: ModelConfig, tokenizer: SizedTokenizer) -> None:
    """Checks that a tokenizer fits the model. Either may have more ids than the other.

    Embeddings are often padded, and some tokenizers name tokens without rows in the embedding, such as the image
    token of a Gemma 3 without a vision part. A prompt with such an id is refused on arrival.

    Raises:
      ConfigError: EOS ids of the model are beyond the tokenizer's ids.
    """
    size = tokenizer.vocab_size
    if size > config.vocab_size:
        logger.warning(
            "the tokenizer has %s ids, the embedding %s rows: prompts with an id from %s on are refused",
            *(f"{count:,}" for count in (size, config.vocab_size, config.vocab_size)),
        )
    if beyond := [f"{i:,}" for i in config.eos_ids if i >= size]:
        raise ConfigError(
            f"eos_token_id {', '.join(beyond)} is beyond the tokenizer's {size:,} ids; they belong to different models"
        )
