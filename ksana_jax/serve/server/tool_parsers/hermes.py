"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3, SmolLM3; a list of SmolLM2, whose
template names no tools."""

from __future__ import annotations

from ksana_jax.serve.server.tool_parsers.base import NAME, Form, Read, ToolParser, call_of, json_at

START, END = "<tool_call>", "</tool_call>"


def read(text: str) -> Read | None:
    """Returns the call, or the list of calls, between tags; see `ToolParser.read`."""
    if (found := json_at(text, len(START))) is None:  # the end tag may be in an argument
        return None
    value, end = found
    rest = text[end:].lstrip()
    if not rest.startswith(END):
        if END.startswith(rest[: len(END)]):
            return None
        raise ValueError("JSON is followed by other text")
    calls = value if isinstance(value, list) else [value]
    return [call_of(call) for call in calls], len(text) - len(rest) + len(END)


HERMES = ToolParser(
    templates=("<tool_call>",),
    starts=(START,),
    end=END,
    read=read,
    form=Form(f'{START}\n{{"name": "{NAME}", "arguments": ', f"}}\n{END}", "\n"),
)
SMOLLM = ToolParser(
    templates=("SmolLM",),
    starts=(START,),
    end=END,
    read=read,
    form=Form(f'{{"name": "{NAME}", "arguments": ', "}", ", ", f"{START}[", f"]{END}"),
)
