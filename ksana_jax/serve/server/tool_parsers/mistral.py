"""[TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...} of models since 2025: Mistral."""

from __future__ import annotations

from ksana_jax.serve.server.tool_parsers.base import NAME, Call, Form, Read, ToolParser, arguments_of, call_of, json_at

START, ARGS = "[TOOL_CALLS]", "[ARGS]"


def read(text: str) -> Read | None:
    """Returns the calls after the marker; see `ToolParser.read`."""
    rest = text[len(START) :].lstrip()
    at = len(text) - len(rest)
    if not rest.startswith("["):
        name, brace, _ = rest.partition("{")
        if not brace or (found := json_at(text, at + len(name))) is None:
            return None
        return [Call(name.removesuffix(ARGS).partition("[CALL_ID]")[0].strip(), arguments_of(found[0]))], found[1]
    if (found := json_at(text, at)) is None:
        return None
    return [call_of(call) for call in found[0]], found[1]


MISTRAL = ToolParser(
    templates=(START,),
    starts=(START,),
    end="}",
    read=read,
    form=Form(f'{{"name": "{NAME}", "arguments": ', "}", ", ", f"{START}[", "]"),
)
MISTRAL_ARGS = ToolParser(
    templates=(ARGS,), starts=(START,), end="}", read=read, form=Form(f"{START}{NAME}{ARGS}", "", "")
)
