"""`ksana align`: where two ways to compute one model part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ksana_jax.cli.options import AsJson

_SIDE = "settings of an engine as 'key=value key=value', a .yaml file of them, a .json file of log-probabilities, or - "


def align(
    a: Annotated[str, typer.Argument(help=_SIDE + "for default settings", show_default=False)],
    b: Annotated[str | None, typer.Argument(help="the other side", show_default="none: writes --out")] = None,
    model: Annotated[str, typer.Option(help="a Hugging Face directory, or the name of a shipped model")] = "ksana-tiny",
    num_prompts: Annotated[int, typer.Option(help="prompts, cut from the held-out texts")] = 4,
    prompt_tokens: Annotated[int, typer.Option(help="tokens of each prompt")] = 64,
    num_tokens: Annotated[int, typer.Option(help="tokens generated greedily after each prompt")] = 64,
    seed: Annotated[int, typer.Option(help="seed for the choice of prompts")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="write A's log-probabilities to this .json file", show_default=False)
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="exit with code 1 if two log-probabilities differ by more", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compares tokens, log-probabilities and operators of two settings, or of an engine and stored log-probabilities.

    Prints the first greedy token that differs, quantiles of the differences of log-probabilities of the same texts, and
    the operator in which they start: every operator of B gets what that of A got.
    """
    from ksana_jax import checks
    from ksana_jax.align.command import Texts, align_and_show

    sizes = {"--num-prompts": num_prompts, "--prompt-tokens": prompt_tokens, "--num-tokens": num_tokens}
    checks.require(*(checks.integer(name, value, 1) for name, value in sizes.items()))
    texts = Texts(num_prompts, prompt_tokens, num_tokens, seed)
    raise typer.Exit(align_and_show(a, b, model, texts, out, threshold, as_json))
