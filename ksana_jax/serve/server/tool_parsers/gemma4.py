"""<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>: Gemma 4; FunctionGemma with other tokens."""

from __future__ import annotations

import functools
import json
import re

from ksana_jax.serve.server.tool_parsers.base import Call, Read, ToolParser, arguments_of, json_at

# A word outside texts; with a colon, a key.
_WORD = re.compile(r"([^\s{}\[\],:]+)(\s*:)?")
_JSON = re.compile(r'true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|".*"')
_LITERALS = {"True": "true", "False": "false", "None": "null"}


def read(text: str, *, start: str, end: str, quote: str) -> Read | None:
    """Returns the call between two tokens, texts between quotes; see `ToolParser.read`."""
    at = -1
    while (at := text.find(end, at + 1)) >= 0:
        if text.count(quote, 0, at) % 2 == 0:  # not in a text
            break
    else:
        return None
    name, brace, inside = text[len(start) : at].strip().removeprefix("call:").partition("{")
    parts = (brace + inside).split(quote)
    parts[::2] = [_WORD.sub(_as_json, part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    found = json_at("".join(parts))
    if found is None or found[1] != len("".join(parts)):
        raise ValueError("arguments are no object")
    return [Call(name.strip(), arguments_of(found[0]))], at + len(end)


def _as_json(word: re.Match[str]) -> str:
    text = _LITERALS.get(word[1], word[1])
    if word[2] is None and _JSON.fullmatch(text):
        return text
    return json.dumps(word[1].strip('"')) + (word[2] or "")


def _parser(template: str, start: str, end: str, quote: str) -> ToolParser:
    reader = functools.partial(read, start=start, end=end, quote=quote)
    return ToolParser(templates=(template,), starts=(start,), end=end, read=reader, form=None)


GEMMA4 = _parser("<|tool_call>", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _parser("<start_function_call>", "<start_function_call>", "<end_function_call>", "<escape>")
