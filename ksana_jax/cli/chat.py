"""`ksana chat`: chats with a model in the terminal, or with messages read from a pipe."""

from __future__ import annotations

import contextlib
import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from ksana_jax.cli.fields import takes_fields
from ksana_jax.cli.options import ChatTemplate, MaxTokens, Model, TextOptions, read_template
from ksana_jax.cli.text import decoded_input, print_stream
from ksana_jax.core.errors import one_line

HELP = "/reset clears the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."


@takes_fields(TextOptions)
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="system message", show_default=False)] = None,
    max_tokens: MaxTokens = 512,
    chat_template: ChatTemplate = None,
    *,
    options: dict[str, Any],
) -> None:
    """Chats with a model that has a chat template; each line of input is a message.

    Commands in the conversation: /help, /reset, /exit.
    """
    from ksana_jax.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(model)
    if chat_template is not None:
        tokenizer.set_templates({"default": read_template(model, chat_template)}, "--chat-template")
    if tokenizer.chat_template is None:  # fails before the weights are read
        why = tokenizer.no_template or f"{model} has no chat template"
        raise ValueError(f"{why}; `ksana generate` works without one, and --chat-template gives one")
    given = TextOptions(**options)
    params = given.sampling_params(max_tokens)
    # The prefix cache saves recomputing earlier turns.
    llm = given.make_llm(model, tokenizer=tokenizer, enable_prefix_caching=True)
    if sys.stdin.isatty():
        print(HELP, file=sys.stderr)
        with contextlib.suppress(ImportError):
            import_module("readline")  # gives input() line editing and history
    converse(llm, [{"role": "system", "content": system}] if system else [], params)


def converse(llm, opening: list[dict[str, str]], params) -> None:
    """Answers each line of standard input until it ends. Messages that cannot be answered are dropped."""
    messages = list(opening)
    while (line := _next_line()) not in (None, "/exit"):
        if line == "/reset":
            messages = list(opening)
        elif line == "/help":
            print(HELP, file=sys.stderr)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                [prompt] = llm.chat_prompts(asked)
                answer = print_stream(llm, prompt, params)
            except ValueError as error:  # the template rejected the message, or the conversation is too long
                print(f"ksana: error: {one_line(error)}; /reset clears the conversation", file=sys.stderr)
            except KeyboardInterrupt:
                print("\nksana: answer stopped and message dropped", file=sys.stderr)
            else:
                messages = [*asked, {"role": "assistant", "content": answer}]


def _next_line() -> str | None:
    try:
        with decoded_input():
            return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
