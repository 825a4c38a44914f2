"""Checks that a run resumes with its original configuration. Knows configurations and JSON files, no arrays.

A run's folder records the sources of its parts: tokens.npz the corpus and the tokenizer's settings, the checkpoints the
fields of the configuration. A resumed run with other values is rejected, except for the fields in MAY_CHANGE, which
determine where a run writes, when it ends and how often it reports, but not what a step learns.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.training.settings import TrainConfig
from ksana_jax.core.config import ConfigError
from ksana_jax.core.files import open_to_update, read_bytes, write_atomic

# num_steps and budget_s also move the learning rate's decay: a run may be extended or ended early.
# corpus_dir may be another folder with the same files, whose digest is in tokens.npz.
MAY_CHANGE = frozenset(
    {
        "out_dir",
        "export_dir",
        "first_export_s",
        "corpus_dir",
        "num_steps",
        "budget_s",
        "log_every",
        "eval_every",
        "eval_sequences",
        "checkpoint_every_s",
        "checkpoint_every",
        "keep_checkpoints",
    }
)


def fixed_fields(config: TrainConfig) -> dict[str, Any]:
    """Returns the fields that must not change when a run resumes, with dotted names."""
    fields = {k: v for k, v in dataclasses.asdict(config).items() if k not in MAY_CHANGE}
    return fields | {f"model.{k}": v for k, v in fields.pop("model").items()}


def tokens_source(config: TrainConfig, texts: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Returns the sources of tokens.npz and tokenizer.model. texts: (name, text) of every file of the corpus."""
    digest = hashlib.sha256()
    for name, text in texts:
        content = text.encode()
        digest.update(f"{name} {len(content)} ".encode() + content)
    return {
        "corpus": digest.hexdigest()[:16],
        "vocab_size": config.vocab_size,
        "tokenizer_sample_bytes": config.tokenizer_sample_bytes,
        "seed": config.seed,
        "init_from": config.init_from,
    }


def check_same(what: Path, began: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Checks that `what` was created with the current values; keys missing on either side are not compared.

    Raises:
      ConfigError: values differ; each of them is named.
    """
    different = [f"{k} {began[k]!r} (now {now[k]!r})" for k in now if k in began and began[k] != now[k]]
    if different:
        raise ConfigError(
            f"{what} was made with {', '.join(different)}: resume with those values, or use another out_dir"
        )


def read_fields(path: Path) -> dict[str, Any]:
    """Reads the recorded fields from a JSON file; empty if there is none.

    Raises:
      ConfigError: the file does not contain a JSON object.
    """
    if not path.exists():
        return {}
    try:
        fields = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds {type(fields).__name__}, must be a JSON object")
    return fields


class TrainLog:
    """Appends records to a file, after dropping its lines of steps beyond `step` and any incomplete line."""

    def __init__(self, path: Path, step: int):
        kept = []
        if path.exists():
            for line in read_bytes(path).decode().splitlines():
                try:
                    at = json.loads(line)["step"]
                except (ValueError, KeyError, TypeError):
                    break
                if at <= step:
                    kept.append(line + "\n")
        write_atomic(path, "".join(kept))
        self._path = path

    def write(self, record: dict) -> None:
        """Appends one line."""
        with open(open_to_update(self._path, os.O_APPEND), "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
