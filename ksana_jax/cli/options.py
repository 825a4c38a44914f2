"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Experiment = Annotated[Path, typer.Argument(help="a YAML file, or the name of a shipped one", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value, dotted: engine.block_size=8", show_default=False)
]
Out = Annotated[Path | None, typer.Option(help="output folder", show_default="runs/NAME")]
AsJson = Annotated[bool, typer.Option("--json", help="end with one line of JSON")]

# A model that gives text.
Model = Annotated[str, typer.Argument(help="a Hugging Face directory, or ksana-tiny")]
MaxTokens = Annotated[int, typer.Option(help="maximum tokens of output")]
Temperature = Annotated[float, typer.Option(help="0 always takes the most probable token")]
TopP = Annotated[float, typer.Option(help="sample from the smallest set of tokens with this probability")]
Seed = Annotated[int | None, typer.Option(help="the same seed gives the same text", show_default=False)]
Dtype = Annotated[str, typer.Option(help="of weights and KV: f32, bf16, f16, or auto for the checkpoint's")]
Window = Annotated[int | None, typer.Option(help="attention window in tokens", show_default=False)]
Sinks = Annotated[int, typer.Option(help="sink tokens at cache positions, with --window")]
MaxModelLen = Annotated[int | None, typer.Option(help="maximum tokens of prompt plus output", show_default=False)]
