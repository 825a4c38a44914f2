"""<｜DSML｜invoke name="f"> with parameters as tags, whose attribute tells texts from JSON: DeepSeek V3.2 and V4."""

from __future__ import annotations

import re
from typing import Any

from ksana_jax.serve.server.tool_parsers.base import Call, Read, ToolParser, arguments_of, json_at

# V3.2's, V4's.
STARTS = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
_INVOKE = re.compile(r'\s*<｜DSML｜invoke name="([^"\n]+)">')
_PARAMETER = re.compile(
    r'\s*<｜DSML｜parameter name="([^"\n]+)" string="(true|false)">(.*?)</｜DSML｜parameter>'
    r"(?=\s*(?:<｜DSML｜parameter |</｜DSML｜invoke>))",
    re.DOTALL,
)
_DONE = re.compile(r"\s*</｜DSML｜invoke>")


def read(text: str) -> Read | None:
    """Returns the calls of a block; see `ToolParser.read`."""
    start = next(start for start in STARTS if text.startswith(start))
    close, calls, at = re.compile(rf"\s*</{start[1:]}"), [], len(start)
    while (invoke := _INVOKE.match(text, at)) is not None:
        at, found = invoke.end(), {}
        while (parameter := _PARAMETER.match(text, at)) is not None:
            at, found[parameter[1]] = parameter.end(), _value(parameter[3], parameter[2] == "true")
        if (done := _DONE.match(text, at)) is None:
            return None
        calls.append(Call(invoke[1], arguments_of(found)))
        at = done.end()
    end = close.match(text, at)
    return None if end is None else (calls, end.end())


def _value(text: str, is_text: bool) -> Any:
    found = None if is_text else json_at(text)
    if not is_text and (found is None or text[found[1] :].strip()):
        raise ValueError(f"{text:.20} is not JSON")
    return text if found is None else found[0]


DEEPSEEK_V32 = ToolParser(templates=("｜DSML｜",), starts=STARTS, end="_calls>", read=read, form=None)
