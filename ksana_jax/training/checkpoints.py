"""Checkpoints of a run through orbax: weights, optimiser and progress of a step, written whole or not at all."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from ksana_jax.training.optimizer import TrainState

logger = logging.getLogger(__name__)


class Checkpoints:
    """The newest checkpoints of a directory, by step.

    A directory that is not finished carries a temporary name and is never read; a finished one that cannot be read is
    renamed to torn-STEP and the one before it is taken.
    """

    def __init__(self, directory: Path, keep: int):
        self.directory = directory.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def save(self, step: int, state: TrainState, progress: dict[str, Any]) -> None:
        """Writes a checkpoint; it exists under its name only when all of it is on disk."""
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(progress))
        self._manager.save(step, args=args)

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """Newest readable checkpoint, shaped as `like`, with its progress; None when there is none.

        Raises:
          ValueError: none of the checkpoints there can be read.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), progress=ocp.args.JsonRestore())
        for step in steps:
            try:
                restored = self._manager.restore(step, args=args)
            except Exception as error:  # orbax has many: missing files, short files, other shapes
                logger.warning("checkpoint %d cannot be read, trying the one before: %s", step, str(error).split("\n")[0])
                path = self.directory / str(step)
                path.rename(self.directory / f"torn-{step}")
                self._manager.reload()
            else:
                return restored.state, restored.progress
        if steps:
            raise ValueError(f"none of the checkpoints {steps} in {self.directory} can be read; they are now torn-*")
        return None

    def close(self) -> None:
        """Ends orbax's threads."""
        self._manager.close()
