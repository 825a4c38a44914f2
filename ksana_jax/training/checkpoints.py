"""Checkpoints of a run: the training state and how far it is, through `loading.checkpoint` (orbax, whole or absent)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ksana_jax.files import write_atomic
from ksana_jax.loading.checkpoint import latest_step, restore_tree, save_checkpoint
from ksana_jax.training.optimizer import TrainState
from ksana_jax.training.resume import check_same, read_fields

FIELDS = "config.json"


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is. The batches to come follow from the step.

    step: optimiser steps done; tokens: targets scored in them; elapsed_s: seconds of training with its evaluations.
    """

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


def save(directory: Path, state: TrainState, progress: Progress, keep: int, fields: dict[str, Any]) -> None:
    """Writes a checkpoint, complete when this returns. fields: of the configuration, which a resumed run must share."""
    if read_fields(directory / FIELDS) != fields:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / FIELDS, json.dumps(fields, indent=1) + "\n")
    save_checkpoint(directory, _tree(state, progress), step=progress.step, keep=keep)


def restore(directory: Path, like: TrainState, fields: dict[str, Any]) -> tuple[TrainState, Progress] | None:
    """The newest checkpoint that can be read, torn ones skipped with a warning; None when there is none.

    Raises:
      ConfigError: the checkpoints there were made with other fields; each is named.
      LoadError: the checkpoints there are of another model.
    """
    if latest_step(directory) is None:
        return None
    check_same(directory, read_fields(directory / FIELDS), fields)
    wanted = _tree(like, Progress())
    wanted["state"] = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like)
    tree, step = restore_tree(directory, wanted)
    return tree["state"], Progress(step, int(tree["tokens"]), float(tree["elapsed_s"]))


def _tree(state: TrainState, progress: Progress) -> dict[str, Any]:
    # On the host: a device has no 64-bit integers unless jax is told so, and 2^31 tokens are soon reached.
    numbers = {"tokens": np.array(progress.tokens, np.int64), "elapsed_s": np.array(progress.elapsed_s, np.float32)}
    return {"state": state, **numbers}
