"""`ksana worker`: a process that computes for another one."""

from __future__ import annotations

from typing import Annotated

import typer

from ksana_jax.cli.fields import read_setting
from ksana_jax.cli.options import TextOptions
from ksana_jax.core.docstrings import field_meanings


def worker(
    distributed: Annotated[
        str,
        typer.Option(help=field_meanings(TextOptions)["distributed"].partition("; None")[0], metavar="YAML"),
    ] = "auto",
    model: Annotated[
        str | None, typer.Option(help="the model's directory on this host, if it differs", show_default=False)
    ] = None,
) -> None:
    """Runs one process of a job that several share; exits when process 0 does."""
    from ksana_jax.engine.distributed.worker import serve

    serve(read_setting("distributed", distributed), model)
