"""{"name": ..., "parameters": {...}}, several divided by semicolons: Llama 3.1 to 3.3, and models without a form."""

from __future__ import annotations

from ksana_jax.serve.server.tool_parsers.base import NAME, Form, Read, ToolParser, call_of, json_at

TAG = "<|python_tag|>"


def read(text: str) -> Read | None:
    """Returns the call that an answer begins with; see `ToolParser.read`."""
    if (found := json_at(text, len(TAG) if text.startswith(TAG) else 0)) is None:
        return None
    value, end = found
    if not isinstance(value, dict) or value.keys().isdisjoint(("parameters", "arguments")):
        raise ValueError("an object without parameters is no call")
    return [call_of(value, "parameters")], end


LLAMA = ToolParser(
    templates=(TAG, "ipython"),
    starts=(TAG, "{"),
    end="}",
    read=read,
    form=Form(f'{{"name": "{NAME}", "parameters": ', "}", "; "),
    anywhere=False,
    separators=";",
)
