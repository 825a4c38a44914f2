"""Files of numbers about a model, which `ksana calibrate` measures on a text and methods read. NumPy only."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.compilation_cache import cache_folder
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.files import path_problem, replacing

_FACTS = "facts"


class Statistics(NamedTuple):
    """Numbers about one model, and where they come from.

    kind: a key of `lab.calibration.KINDS`. model: digest of the model's files. text: its name. sha256: of its contents.
    num_tokens: that were computed. versions: of packages. arrays: by name.
    """

    kind: str
    model: str
    text: str
    sha256: str
    num_tokens: int
    versions: dict[str, str]
    arrays: dict[str, np.ndarray]

    @property
    def digest(self) -> str:
        """Returns a digest of the numbers, 16 hex digits."""
        digest = hashlib.sha256()
        for name, x in sorted(self.arrays.items()):
            digest.update(f"{name} {x.shape} {x.dtype} ".encode() + x.tobytes())
        return digest.hexdigest()[:16]

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        facts = {name: value for name, value in self._asdict().items() if name != "arrays"}
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez_compressed(file, **{_FACTS: np.array(json.dumps(facts))}, **self.arrays)  # pyright: ignore[reportArgumentType]


def read_statistics(path: str | os.PathLike[str], kind: str, model: str | None = None) -> Statistics:
    """Reads a file that `ksana calibrate` has written.

    Args:
      kind: that a method needs. model: digest of the model's files; None accepts any.

    Raises:
      ConfigError: there is no such file, it is of another kind, or of another model.
    """
    checks.require(path_problem("statistics", path), error=ConfigError)
    try:
        found = _read(os.fspath(path), os.stat(path).st_mtime_ns)
    except FileNotFoundError:
        raise ConfigError(f"statistics {path}: no such file; ksana calibrate MODEL --text TEXT --for {kind}") from None
    if found.kind != kind:
        raise ConfigError(f"statistics {path} are for {found.kind}, and {kind} is needed")
    if model is not None and found.model != model:
        raise ConfigError(f"statistics {path} are of a model with the digest {found.model}, this one has {model}")
    return found


@functools.lru_cache(maxsize=4)
def _read(path: str, changed: int) -> Statistics:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        facts: dict[str, Any] = json.loads(str(arrays.pop(_FACTS)))
        return Statistics(**facts, arrays=arrays)
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"statistics {path}: not a file of ksana calibrate: {error}") from error


def default_file(kind: str, model: str) -> Path:
    """Returns the file of a model in the user's cache folder. model: digest of its files."""
    return cache_folder("statistics") / f"{kind}-{model}.npz"
