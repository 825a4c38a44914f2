"""`ksana train`: models of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    file: Annotated[Path, typer.Argument(help="the training configuration, a YAML file", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, dotted: model.d_model=128", show_default=False)
    ] = None,
) -> None:
    """Trains a model, or resumes a training that was interrupted."""
    from ksana_jax.training import train as train_model

    train_model(str(file), overrides or [])
