"""`ksana generate`: prints text from a model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ksana_jax.cli.fields import takes_fields
from ksana_jax.cli.options import MaxTokens, Model, TextOptions

if TYPE_CHECKING:
    from ksana_jax import LLM, SamplingParams
    from ksana_jax.engine.llm import Prompt


@takes_fields(TextOptions)
def generate(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="text to continue; - reads standard input, the default in a pipe"),
    ] = None,
    max_tokens: MaxTokens = 128,
    *,
    options: dict[str, Any],
) -> None:
    """Continues a prompt; prints the text as it is generated."""
    text = prompt if prompt not in (None, "-") else read_prompt(sys.stdin.isatty() and prompt is None)
    given = TextOptions(**options)
    params = given.sampling_params(max_tokens)
    print_stream(given.make_llm(model), text, params)


def read_prompt(interactive: bool) -> str:
    """Reads the prompt from standard input and drops the newline that ends its last line."""
    if interactive:
        raise ValueError("no prompt: give --prompt TEXT, or pipe a text to standard input")
    with decoded_input():
        text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ValueError("no prompt: standard input is empty")
    return text


@contextlib.contextmanager
def decoded_input() -> Iterator[None]:
    """Turns an encoding error of standard input into one that says what to do."""
    try:
        yield
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(
            f"standard input is not {error.encoding}: it has byte 0x{byte:02x}; convert it, or name its encoding in "
            "PYTHONIOENCODING"
        ) from None


def print_stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> str:
    """Prints a completion as it is generated, then a newline; returns its text."""
    pieces = []
    for output in llm.stream(prompt, params, delta=True):
        pieces.append(output.outputs[0].text)
        sys.stdout.write(pieces[-1])
        sys.stdout.flush()
        output.check()
    sys.stdout.write("\n")
    return "".join(pieces)
