"""`ksana calibrate`: measures numbers about a model that methods read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ksana_jax.core.sources import MODEL_HELP


def calibrate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    text: Annotated[
        str, typer.Option(help="a file, a folder, a pattern, file.jsonl#field, or a text's name", show_default=False)
    ],
    use: Annotated[
        str,
        typer.Option(
            "--for", help="duoattention, expected_attention, kvquant, qfilter", metavar="METHOD", show_default=False
        ),
    ],
    num_texts: Annotated[int, typer.Option(help="maximum pieces of the text to compute, from its beginning")] = 16,
    num_tokens: Annotated[int, typer.Option(help="tokens of a piece")] = 1024,
    out: Annotated[
        Path | None, typer.Option(help="the file", show_default="the model's, in the user's cache folder")
    ] = None,
) -> None:
    """Measures on a text the statistics of a model that a method needs.

    Methods find the file by the model's files, or in their setting `statistics`. Take a text that no evaluation uses:
    experiments record its hash.
    """
    from ksana_jax.core import checks
    from ksana_jax.core.units import byte_size
    from ksana_jax.lab.calibration.command import calibrate as measured

    checks.require(checks.integer("--num-texts", num_texts, 1), checks.integer("--num-tokens", num_tokens, 16))
    path = measured(model, text, use, num_texts, num_tokens, out)
    print(f"{path}: {byte_size(path.stat().st_size)}")
