"""`ksana align`: finds where two ways to compute one model diverge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ksana_jax.cli.options import AsJson
from ksana_jax.core.sources import MODEL_HELP

_SIDE = "settings of an engine as 'key=value key=value', a .yaml file of them, a .json file of log-probabilities, or - "


def align(
    a: Annotated[str, typer.Argument(help=_SIDE + "for default settings", show_default=False)],
    b: Annotated[str | None, typer.Argument(help="the other side", show_default="none: writes --out")] = None,
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "ksana-tiny",
    num_prompts: Annotated[
        int | None, typer.Option(help="prompts, cut from the held-out texts", show_default="4; 16 with --choose")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="tokens of each prompt")] = 64,
    num_tokens: Annotated[int, typer.Option(help="tokens generated greedily after each prompt")] = 64,
    seed: Annotated[int, typer.Option(help="seed for the choice of prompts")] = 0,
    choose: Annotated[
        bool,
        typer.Option(
            "--choose", help="measure all implementations that serve A, for engines with operators.prefer: agreement"
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="write A's log-probabilities, or what --choose measures, to this .json file", show_default=False
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="exit with code 1 if two log-probabilities differ by more", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compares tokens, log-probabilities and operators of two settings, or of an engine and stored log-probabilities.

    Prints the first greedy token that differs, quantiles of the differences of log-probabilities of the same texts, and
    the operator where they start: each operator of B gets the inputs that A's got.

    With --choose, measures agreement with the float32 model (or with B, a .json file) and speed of the implementations
    of attention and of products with weights, and keeps both for engines with operators.prefer: agreement.
    """
    from ksana_jax.core import checks
    from ksana_jax.lab.align.command import TextSet, align_and_show

    if num_prompts is None:
        num_prompts = 16 if choose else 4
    sizes = {"--num-prompts": num_prompts, "--prompt-tokens": prompt_tokens, "--num-tokens": num_tokens}
    checks.require(*(checks.integer(name, value, 1) for name, value in sizes.items()))
    texts = TextSet(num_prompts, prompt_tokens, num_tokens, seed)
    if choose:
        from ksana_jax.lab.align.choosing import choose_and_show

        checks.require("--threshold does not go with --choose" if threshold is not None else None)
        raise typer.Exit(choose_and_show(a, b, model, texts, out, as_json))
    raise typer.Exit(align_and_show(a, b, model, texts, out, threshold, as_json))
