"""`ksana generate`: text from a model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def generate(
    model: Annotated[str, typer.Argument(help="a Hugging Face directory, or ksana-tiny")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="text to continue", show_default=False)],
    max_tokens: Annotated[int, typer.Option(help="most tokens of output")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token")] = 0.8,
    top_p: Annotated[float, typer.Option(help="smallest set of tokens of that probability")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same text", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="f32 or bf16")] = "f32",
    window: Annotated[int | None, typer.Option(help="attention window in tokens", show_default=False)] = None,
    sinks: Annotated[int, typer.Option(help="sink tokens at cache positions, with --window")] = 0,
    max_model_len: Annotated[
        int | None, typer.Option(help="most tokens, prompt and output", show_default=False)
    ] = None,
) -> None:
    """Continues a prompt, text appearing as it is made."""
    from ksana_jax import LLM, AttentionPattern, SamplingParams

    if sinks and window is None:
        raise ValueError(f"--sinks {sinks} needs --window")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    pattern = None
    if window is not None:
        pattern = AttentionPattern(window=window, num_sinks=sinks, sink_position="cache" if sinks else "absolute")
    llm = LLM(model, dtype=dtype, max_num_seqs=1, max_model_len=max_model_len, pattern=pattern)
    shown = 0
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
    sys.stdout.write("\n")
