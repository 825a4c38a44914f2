"""A code block tool_code with calls in Python, one a line: Gemma 2 and 3, as their authors prompt them."""

from __future__ import annotations

from ksana_jax.serve.server.tool_parsers.base import Read, ToolParser
from ksana_jax.serve.server.tool_parsers.pythonic import Incomplete, Literals

START, END = "```tool_code", "```"


def read(text: str) -> Read | None:
    """Returns the calls of a block, each also within print(...) or in a list; see `ToolParser.read`."""
    source, calls = Literals(text, len(START)), []
    try:
        while source.peek() != "`":
            inner = source.text.startswith("print(", source.at)
            source.at += len("print(") * inner
            in_list = source.take("[")
            calls.append(source.call())
            while in_list and not source.take("]"):
                source.expect(",")
                calls.append(source.call())
            if inner:
                source.expect(")")
    except Incomplete:
        return None
    if not text.startswith(END, source.at):
        return None
    if not calls:
        raise ValueError("a block without calls")
    return calls, source.at + len(END)


GEMMA = ToolParser(templates=("tool_code",), starts=(START,), end=END, read=read, form=None)
