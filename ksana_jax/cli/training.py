"""`ksana train`: trains a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ksana_jax.cli.logs import show_log


def train(
    file: Annotated[Path, typer.Argument(help="a YAML file, or the name of a shipped one", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="dotted.key=value, such as model.d_model=128", show_default=False)
    ] = None,
) -> None:
    """Trains a model, or resumes an interrupted training run."""
    from ksana_jax.lab.training import train as train_model

    show_log()  # losses and checkpoints are the only output of hours of training
    train_model(str(file), overrides or [])
