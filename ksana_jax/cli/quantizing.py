"""`ksana quantize`: writes a model as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ksana_jax.core.sources import MODEL_HELP


def quantize(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    to: Annotated[
        Literal["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "f16", "bf16", "f32"],
        typer.Option(help="type of the matrices of layers"),
    ] = "q4_1",
    out: Annotated[Path | None, typer.Option(help="the file", show_default="NAME-TYPE.gguf, in this folder")] = None,
) -> None:
    """Writes a model as a GGUF file. Embedding and output head of the types that begin with q are Q8_0; norms are F32.

    Use it with `quantization: stored`, which keeps matrices so in memory; llama.cpp reads it too. int8 and w8a8 need no
    file: they are settings.
    """
    from ksana_jax.core.units import byte_size
    from ksana_jax.loading.gguf_export import export_gguf

    kind = to.upper()
    out = out or Path(f"{Path(model).stem}-{kind}.gguf")
    if out.exists():
        raise FileExistsError(f"{out} exists; give another --out, or remove it")
    export_gguf(model, out, kind)
    print(f"{out}: {byte_size(out.stat().st_size)}")
