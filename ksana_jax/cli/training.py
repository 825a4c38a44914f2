"""`ksana train`: models of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ksana_jax.cli.logs import show_log


def train(
    file: Annotated[Path, typer.Argument(help="a YAML file, or the name of a shipped one", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, dotted: model.d_model=128", show_default=False)
    ] = None,
) -> None:
    """Trains a model, or resumes a training that was interrupted."""
    from ksana_jax.training import train as train_model

    show_log()  # losses and checkpoints: without them hours would pass in silence
    train_model(str(file), overrides or [])
