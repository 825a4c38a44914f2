"""Checkpoints of a training run, written by orbax: one directory per step. Knows no Hugging Face names.

`step_00000012` is written under a temporary name and renamed; it is complete once `files.json` lists the size of every
file in it. A killed process or a full disk leaves a directory that lacks or contradicts that list; it is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from ksana_jax.core import checks
from ksana_jax.core.errors import LoadError
from ksana_jax.core.files import read_bytes, write_atomic

FILES = "files.json"
MAX_LISTED = 20
# Raised by orbax and the store below it for lost or damaged files.
READ_ERRORS = (ValueError, OSError, KeyError, AttributeError, RuntimeError)
_STEP = re.compile(r"step_(\d{8,})")
_UNFINISHED = re.compile(r"step_\d{8,}\.orbax-checkpoint-tmp.*")


def save_checkpoint(path: str | os.PathLike[str], tree: Any, step: int | None = None, keep: int | None = 3) -> int:
    """Saves a pytree of arrays, such as a training state; the checkpoint is complete when it returns.

    Args:
      path: directory of the run; created if it does not exist.
      step: number of the step, replacing an existing one; None takes the next number.
      keep: number of newest steps to keep; None keeps all.

    Returns:
      The step.
    """
    root = Path(path).resolve()
    root.mkdir(parents=True, exist_ok=True)
    if step is None:
        step = max(_steps(root), default=-1) + 1
    checks.require(checks.integer("step", step, 0), checks.integer("keep", keep, optional=True))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(_directory(root, step), _named(tree), force=True)
    listed = _directory(root, step) / FILES
    write_atomic(listed, json.dumps(_file_sizes(listed.parent), indent=1))
    for name in [entry.name for entry in root.iterdir() if _UNFINISHED.fullmatch(entry.name)]:
        shutil.rmtree(root / name, ignore_errors=True)
    if keep is not None:
        # Later steps were abandoned when a run resumed before them; they stay until training overtakes them.
        for old in [s for s in _steps(root) if s <= step][:-keep]:
            shutil.rmtree(_directory(root, old), ignore_errors=True)
    return step


def restore_tree(path: str | os.PathLike[str], wanted: Any, step: int | None = None) -> tuple[Any, int]:
    """Restores a pytree saved by `save_checkpoint` to the default device.

    Args:
      wanted: the same pytree with jax.ShapeDtypeStruct for arrays; stored values are converted to its dtypes. NumPy
        arrays in it are restored as NumPy arrays on the host, which can have 64 bits where jax has 32.
      step: None takes the latest readable step, and warns about incomplete ones that it skips.

    Returns:
      The tree, and its step.

    Raises:
      LoadError: no complete step exists, or its tree differs; the first 20 differing paths are listed.
    """
    root = Path(path).resolve()
    steps = [step] if step is not None else sorted(_steps(root), reverse=True)
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    named = {
        name: w if isinstance(w, np.ndarray) else jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=place)
        for name, w in _named(wanted).items()
    }
    torn = []
    with ocp.StandardCheckpointer() as checkpointer:
        for candidate in steps:
            directory = _directory(root, candidate)
            if not _complete(directory):
                torn.append(f"{directory.name} is not complete")
                continue
            try:
                _check_tree(directory, checkpointer.metadata(directory).item_metadata.tree, named)
                leaves = checkpointer.restore(directory, named)
            except LoadError:
                raise
            except READ_ERRORS as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                torn.append(f"{directory.name} cannot be read: {reason[:200]}")
                continue
            if torn:
                warnings.warn(f"{root}: {'; '.join(torn)}; step {candidate} is used instead", stacklevel=2)
            return jax.tree.unflatten(jax.tree.structure(wanted), [leaves[name] for name in named]), candidate
    raise LoadError(f"{root} holds no complete checkpoint" + (f": {'; '.join(torn)}" if torn else ""))


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """Returns the newest complete step, or None."""
    root = Path(path).resolve()
    return next((step for step in sorted(_steps(root), reverse=True) if _complete(_directory(root, step))), None)


def _steps(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    return sorted(int(match[1]) for entry in root.iterdir() if (match := _STEP.fullmatch(entry.name)))


def _directory(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def _named(tree: Any) -> dict[str, Any]:
    """Returns leaves by path, such as layers.0.w_q."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _file_sizes(directory: Path) -> dict[str, int]:
    """Returns the sizes in bytes of a step's files, except the list itself, by relative path."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stem != Path(FILES).stem)
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def _complete(directory: Path) -> bool:
    try:
        return json.loads(read_bytes(directory / FILES)) == _file_sizes(directory)
    except (OSError, ValueError):
        return False


def _check_tree(
    directory: Path, stored: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct | np.ndarray]
) -> None:
    problems = []
    for name in sorted(stored.keys() | wanted.keys()):
        if name not in stored:
            problems.append(f"{name} is missing")
        elif name not in wanted:
            problems.append(f"{name} is not part of the model")
        elif tuple(stored[name].shape) != wanted[name].shape:
            problems.append(f"{name} has shape {list(stored[name].shape)}, not {list(wanted[name].shape)}")
        elif np.issubdtype(stored[name].dtype, np.integer) != np.issubdtype(wanted[name].dtype, np.integer):
            problems.append(f"{name} is {stored[name].dtype}, not {wanted[name].dtype}")
    if problems:
        listed = "; ".join(problems[:MAX_LISTED])
        more = f"; and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        raise LoadError(f"{directory}: {len(problems)} arrays differ: {listed}{more}")
