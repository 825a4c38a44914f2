"""`ksana train`: models of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ksana_jax.cli.options import Overrides


def train(
    file: Annotated[Path, typer.Argument(help="the training configuration, a YAML file", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Trains a model, or goes on with a training that was interrupted."""
    from ksana_jax.training import train as train_model

    train_model(str(file), overrides or [])
