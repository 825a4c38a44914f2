"""Reads a text, has a kind of calibration measure a model on it, and writes the file."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

import numpy as np

from ksana_jax import __version__
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import resolve
from ksana_jax.core.sources import model_path
from ksana_jax.core.statistics import Statistics, default_file
from ksana_jax.lab.calibration import KINDS
from ksana_jax.lab.runs.text_files import candidates
from ksana_jax.loading.digest import digest_of_files
from ksana_jax.loading.load import load_model
from ksana_jax.tokenizers import load_tokenizer


def calibrate(model: str, text: str, kind: str, num_texts: int, num_tokens: int, out: Path | None) -> Path:
    """Measures a model, and writes the file; returns its path.

    Args:
      text: an entry as experiments name texts, see `lab.runs.text_files`.
      kind: a key of KINDS.
      num_texts, num_tokens: pieces of the text that are computed, from its beginning, and tokens of each.

    Raises:
      ConfigError: there is no such kind, or the text is too short.
    """
    measure = resolve(kind, KINDS, "--for")
    path = model_path(model)
    content = "".join(text for _, text in candidates([text], "--text"))
    tokens = _pieces(model, content, num_texts, num_tokens)
    config, params = load_model(path)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "numpy")} | {"ksana_jax": __version__}
    digest, sha256 = digest_of_files(path), hashlib.sha256(content.encode()).hexdigest()
    found = Statistics(kind, digest, text, sha256, tokens.size, versions, measure(params, config, tokens))
    out = out or default_file(kind, digest)
    found.write(out)
    return out


def _pieces(model: str, text: str, num_texts: int, num_tokens: int) -> np.ndarray:
    """Returns token ids [n, T] of pieces side by side, each after the model's first token if it has one."""
    tokenizer = load_tokenizer(model)
    first = tokenizer.encode("")[:1]
    ids = np.array(tokenizer.encode(text)[len(first) :], np.int32)
    size = num_tokens - len(first)
    count = min(num_texts, len(ids) // size)
    if count < 1:
        raise ConfigError(f"--text has {len(ids):,} tokens, and a piece takes {size:,}: lower --num-tokens")
    ids = ids[: count * size].reshape(count, size)
    return np.concatenate([np.tile(np.array(first, np.int32), (count, 1)), ids], axis=1)
