"""Checkpoints of a run: the training state and how far it is, through `loading.checkpoint` (orbax, whole or absent)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ksana_jax.loading.checkpoint import latest_step, restore_tree, save_checkpoint
from ksana_jax.training.optimizer import TrainState


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is. The batches to come follow from the step.

    step: optimiser steps done; tokens: targets scored in them; elapsed_s: seconds of training with its evaluations.
    """

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


def save(directory: Path, state: TrainState, progress: Progress, keep: int) -> None:
    """Writes a checkpoint; complete when it returns."""
    save_checkpoint(directory, _tree(state, progress), step=progress.step, keep=keep)


def restore(directory: Path, like: TrainState) -> tuple[TrainState, Progress] | None:
    """The newest checkpoint that can be read, torn ones skipped with a warning; None when there is none.

    Raises:
      LoadError: the checkpoints there are of another model.
    """
    if latest_step(directory) is None:
        return None
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), _tree(like, Progress()))
    tree, step = restore_tree(directory, shapes)
    return tree["state"], Progress(step, int(tree["tokens"]), float(tree["elapsed_s"]))


def _tree(state: TrainState, progress: Progress) -> dict[str, Any]:
    return {"state": state, "tokens": np.int32(progress.tokens), "elapsed_s": np.float32(progress.elapsed_s)}
