"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Experiment = Annotated[Path, typer.Argument(help="the experiment, a YAML file", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value, dotted: engine.block_size=8", show_default=False)
]
Out = Annotated[Path | None, typer.Option(help="output folder", show_default="runs/NAME")]
AsJson = Annotated[bool, typer.Option("--json", help="end with one line of JSON")]
