"""<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>: Gemma 4."""

from __future__ import annotations

import json
import re

from ksana_jax.serve.server.tool_parsers.base import LITERALS, Call, Read, ToolParser, arguments_of, json_at

START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
# Words outside texts; with a colon, a key.
_WORD = re.compile(r"([^\s{}\[\],:](?:[^{}\[\],:]*[^\s{}\[\],:])?)(\s*:)?")
_JSON = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


def read(text: str) -> Read | None:
    """Returns the call between the tokens; see `ToolParser.read`."""
    at = text.find(END)
    while at >= 0 and text.count(QUOTE, 0, at) % 2:  # in a text
        at = text.find(END, at + 1)
    if at < 0:
        return None
    name, brace, inside = text[len(START) : at].strip().removeprefix("call:").partition("{")
    parts = (brace + inside).split(QUOTE)
    parts[::2] = [_WORD.sub(_as_json, part) for part in parts[::2]]
    parts[1::2] = map(json.dumps, parts[1::2])
    found = json_at(written := "".join(parts))
    if found is None or found[1] != len(written):
        raise ValueError("arguments are no object")
    return [Call(name.strip(), arguments_of(found[0]))], at + len(END)


def _as_json(word: re.Match[str]) -> str:
    text = LITERALS.get(word[1], word[1])
    return text if word[2] is None and _JSON.fullmatch(text) else json.dumps(word[1].strip('"')) + (word[2] or "")


GEMMA4 = ToolParser(templates=(START,), starts=(START,), end=END, read=read, form=None)
