"""A code block tool_code with calls in Python, one a line: Gemma 2 and 3, as their authors prompt them."""

from __future__ import annotations

from ksana_jax.serve.server.tool_parsers import pythonic
from ksana_jax.serve.server.tool_parsers.base import Read, ToolParser

START, END = "```tool_code", "```"


def read(text: str) -> Read | None:
    """Returns the calls of a block, each also within print(...) or a list; see `ToolParser.read`."""
    block, end, _ = text[len(START) :].partition(END)
    if not end:
        return None
    lines = [line.strip() for line in block.splitlines() if line.strip()]
    lines = [line[len("print(") : -1] if line.startswith("print(") and line[-1] == ")" else line for line in lines]
    found = pythonic.read(f"[{','.join(line.strip('[]') for line in lines)}]")
    if found is None:
        raise ValueError("a block without whole calls")
    return found[0], len(START) + len(block) + len(END)


GEMMA = ToolParser(templates=("tool_code",), starts=(START,), end=END, read=read, form=None)
