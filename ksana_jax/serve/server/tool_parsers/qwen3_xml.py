"""<tool_call><function=name><parameter=x>value</parameter></function></tool_call>: Qwen3-Coder, Qwen3.5, Nemotron 3."""

from __future__ import annotations

import json
import re

from ksana_jax.serve.server.tool_parsers.base import Call, Read, ToolParser

START, END = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]+)>")  # Qwen3-Coder forgets <tool_call> at times
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL)
_CLOSE = re.compile(r"\s*</function>\s*</tool_call>")


def read(text: str) -> Read | None:
    """Returns the call with its arguments as texts; see `ToolParser.read`."""
    if (head := _HEAD.match(text)) is None:
        raise ValueError("a call has no function")
    at, found = head.end(), {}
    while (parameter := _PARAMETER.match(text, at)) is not None:
        at, found[parameter[1].strip()] = parameter.end(), parameter[2]
    if (close := _CLOSE.match(text, at)) is None:
        return None
    return [Call(head[1].strip(), json.dumps(found, ensure_ascii=False))], close.end()


QWEN3_XML = ToolParser(
    templates=("<parameter=",), starts=(START, "<function="), end=END, read=read, form=None, typed=False
)
