"""Channels: analysis is reasoning, commentary to a function a call, commentary and final are text: gpt-oss (Harmony).

Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re

from ksana_jax.serve.server.tool_parsers.base import NAME, THINKS, Call, Form, Read, ToolParser, arguments_of, json_at

ENDS = ("<|end|>", "<|call|>", "<|return|>")
STARTS = ("<|channel|>", "<|start|>assistant", "to=functions.", *ENDS)
MAX_HEADER = 512
_HEADER = re.compile(r"(.*?)<\|message\|>", re.DOTALL)
_FUNCTION = re.compile(r"to=functions\.([\w.:/-]+)")


def read(text: str) -> Read | None:
    """Returns the call, or drops the header or the end of a message; see `ToolParser.read`."""
    if mark := next((mark for mark in ENDS if text.startswith(mark)), ""):
        return [], len(mark)
    if (header := _HEADER.match(text, 0, MAX_HEADER)) is None:
        if len(text) >= MAX_HEADER:
            raise ValueError("a message has no header")
        return None
    if (function := _FUNCTION.search(header[1])) is not None:
        found = json_at(text, header.end())
        return None if found is None else ([Call(function[1], arguments_of(found[0]))], found[1])
    return [THINKS] if "<|channel|>analysis" in header[1] else [], header.end()


HARMONY = ToolParser(
    templates=("<|channel|>analysis",),
    starts=STARTS,
    end=">",
    read=read,
    form=Form(f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>", "", f"<|call|>{STARTS[1]}"),
    channels="<|channel|>final<|message|>",
)
