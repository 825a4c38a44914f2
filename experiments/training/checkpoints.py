"""Saves and restores the state and progress of a training run, through `steps`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.training.optimizer import TrainState
from experiments.training.resume import check_same, read_fields
from experiments.training.steps import latest_step, restore_tree, save_checkpoint
from ksana_jax.core.files import write_atomic

FIELDS = "config.json"


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a run; the step determines all later batches.

    step: optimiser steps done. tokens: targets scored in them. elapsed_s: seconds of training, evaluations included.
    """

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


def save(directory: Path, state: TrainState, progress: Progress, keep: int, fields: dict[str, Any]) -> None:
    """Writes a checkpoint; it is complete on return. fields: configuration fields that a resumed run must share."""
    if read_fields(directory / FIELDS) != fields:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / FIELDS, json.dumps(fields, indent=1) + "\n")
    save_checkpoint(directory, _tree(state, progress), step=progress.step, keep=keep)


def restore(directory: Path, like: TrainState, fields: dict[str, Any]) -> tuple[TrainState, Progress] | None:
    """Restores the newest readable checkpoint, skipping incomplete ones with a warning; None if there is none.

    Raises:
      ConfigError: the checkpoints were made with other fields; each is named.
      LoadError: the checkpoints are of another model.
    """
    if latest_step(directory) is None:
        return None
    check_same(directory, read_fields(directory / FIELDS), fields)
    wanted = _tree(like, Progress())
    wanted["state"] = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like)
    tree, step = restore_tree(directory, wanted)
    return tree["state"], Progress(step, int(tree["tokens"]), float(tree["elapsed_s"]))


def _tree(state: TrainState, progress: Progress) -> dict[str, Any]:
    # On the host, because jax arrays have no 64-bit integers by default, and runs exceed 2^31 tokens.
    numbers = {"tokens": np.array(progress.tokens, np.int64), "elapsed_s": np.array(progress.elapsed_s, np.float32)}
    return {"state": state, **numbers}
