"""`ksana generate`: text from a model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ksana_jax.cli.options import Dtype, MaxModelLen, MaxTokens, Model, Seed, Sinks, Temperature, TopP, Window

if TYPE_CHECKING:
    from ksana_jax import LLM, AttentionPattern, SamplingParams
    from ksana_jax.engine.llm import Prompt


def generate(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="text to continue; - is standard input, as is none in a pipe"),
    ] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    seed: Seed = None,
    dtype: Dtype = "f32",
    window: Window = None,
    num_sinks: Sinks = 0,
    max_model_len: MaxModelLen = None,
) -> None:
    """Continues a prompt, printing text as it is generated."""
    text = prompt if prompt not in (None, "-") else read_prompt(sys.stdin.isatty() and prompt is None)
    from ksana_jax import LLM, SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    pattern = window_pattern(window, num_sinks)
    print_stream(LLM(model, dtype=dtype, max_num_seqs=1, max_model_len=max_model_len, pattern=pattern), text, params)


def read_prompt(nobody_pipes: bool) -> str:
    """The prompt on standard input, without the newline that ends its last line."""
    if nobody_pipes:
        raise ValueError("no prompt: give --prompt TEXT, or pipe a text into standard input")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ValueError("no prompt: standard input is empty")
    return text


def window_pattern(window: int | None, num_sinks: int) -> AttentionPattern | None:
    """The pattern that --window and --num-sinks ask for; None is the model's own."""
    from ksana_jax import AttentionPattern

    if num_sinks and window is None:
        raise ValueError(f"--num-sinks {num_sinks} needs --window")
    return None if window is None else AttentionPattern(window=window, num_sinks=num_sinks)


def print_stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> str:
    """Prints a completion as it is generated, and a newline; returns its text."""
    text = ""
    for output in llm.stream(prompt, params):
        shown, text = len(text), output.outputs[0].text
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        output.check()
    sys.stdout.write("\n")
    return text
