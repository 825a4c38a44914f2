"""`ksana lm-eval`: lm-evaluation-harness with the model "ksana"."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def lm_eval(
    arguments: Annotated[list[str], typer.Argument(help="arguments of lm_eval", show_default=False)],
) -> None:
    """Runs lm-evaluation-harness with the model "ksana": --model ksana --model_args pretrained=DIR --tasks ...

    Needs the extra eval. Takes lm_eval's arguments; model_args are LLM's:
    docs/use/evaluation.md.
    """
    from ksana_jax.lab.evaluation import harness  # registers the model

    assert harness.KsanaLM is not None
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
