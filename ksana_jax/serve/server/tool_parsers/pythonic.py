"""[name(key="text", other=1)], arguments as literals of Python: Llama 4, LFM2. Calls become JSON, unevaluated."""

from __future__ import annotations

import ast
import json
import re

from ksana_jax.serve.server.tool_parsers.base import Read, ToolParser, call_of, json_at

# That may be around the list, in LFM2 and in Llama 4.
TAGS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
_TOKEN = re.compile(
    r"\s*(?:(?P<text>'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\")|(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<call>[A-Za-z_][\w.-]*)\(|(?P<key>[A-Za-z_]\w*)\s*=|(?P<word>[A-Za-z]+)|,(?P<last>\s*[\])}])|(?P<mark>[\[\](){},:]))"
)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


def as_json(text: str, at: int) -> tuple[str, int] | None:
    """Returns a list of calls as JSON, and the end of the list in the text; None if the text ends before.

    Raises:
      ValueError: something else stands there.
    """
    found, depth = [], 0
    while (token := _TOKEN.match(text, at)) is not None:
        kind, at = token.lastgroup or "", token.end()
        value = token[kind].strip()
        if kind == "text":
            found.append(json.dumps(ast.literal_eval(value)))
        elif kind == "number":
            found.append(value if re.fullmatch(r"-?(0|[1-9]\d*)", value) else json.dumps(float(value)))
        elif kind == "call":
            if depth != 1:
                raise ValueError("a call stands in arguments")
            found.append(f'{{"name": "{value}", "arguments": {{')
            depth += 1
        elif kind == "key":
            found.append(f'"{value}":')
        elif kind == "word":
            found.append(_WORDS[value] if value in _WORDS else "?")
        else:
            depth += (value in "[{(") - (value in "]})")
            found.append("}}" if value == ")" else value)
            if not depth:
                return "".join(found), at
    rest = text[at:].lstrip()
    if rest and not re.match(r"['\"][^\n]*$|[\w.-]+\s*$|,\s*$", rest):
        raise ValueError(f"{rest:.20} is no literal")
    return None


def read(text: str) -> Read | None:
    """Returns the calls of a list; see `ToolParser.read`."""
    begin = next((tag for tag in TAGS if text.startswith(tag)), "")
    if (found := as_json(text, len(begin))) is None:
        return None
    given, end = found
    calls = json_at(given)
    if calls is None or not calls[0]:
        raise ValueError("a list without calls")
    closing = TAGS.get(begin, "")
    return ([call_of(call) for call in calls[0]], end + len(closing)) if text.startswith(closing, end) else None


PYTHONIC = ToolParser(
    templates=("<|tool_call_start|>", "<|python_start|>", "[func_name1(params_name1"),
    starts=(*TAGS, "["),
    end="]",  # and the tag after it
    read=read,
    form=None,
    anywhere=False,
)
