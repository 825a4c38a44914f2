"""[name(key="text", other=1)], arguments as literals of Python: Llama 4, LFM2. Nothing is evaluated."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from ksana_jax.serve.server.tool_parsers.base import Call, Read, ToolParser, arguments_of

# That may be around the list, in LFM2 and in Llama 4.
TAGS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
MAX_DEPTH = 32
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_TEXT = re.compile(r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"")
_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_SPACE = re.compile(r"\s*")


class Incomplete(Exception):
    """The text ends before its call does."""


class Literals:
    """Reads calls and literals from a text, beginning at `at`; raises ValueError or Incomplete."""

    def __init__(self, text: str, at: int = 0):
        self.text, self.at = text, at

    def peek(self) -> str:
        """Returns the next character that is no white space."""
        self.at = _SPACE.match(self.text, self.at).end()  # pyright: ignore[reportOptionalMemberAccess]
        if self.at == len(self.text):
            raise Incomplete
        return self.text[self.at]

    def take(self, wanted: str) -> bool:
        """Goes past a character if it is the next one."""
        found = self.peek() == wanted
        self.at += found
        return found

    def expect(self, wanted: str) -> None:
        if not self.take(wanted):
            raise ValueError(f"{self.text[self.at]!r} stands where {wanted!r} belongs")

    def name(self) -> str:
        self.peek()
        if (found := _NAME.match(self.text, self.at)) is None:
            raise ValueError("a name is missing")
        self.at = found.end()
        if self.at == len(self.text):
            raise Incomplete
        return found[0]

    def call(self) -> Call:
        name = self.name()
        self.expect("(")
        return Call(name, arguments_of(self.items(")", "=", self.name, MAX_DEPTH)))

    def items(self, close: str, between: str, key: Any, depth: int) -> dict[str, Any]:
        """Returns keys and values up to a closing bracket."""
        found: dict[str, Any] = {}
        while not self.take(close):
            name = key()
            self.expect(between)
            found[name] = self.value(depth - 1)
            if not self.take(",") and self.peek() != close:
                raise ValueError("a comma is missing")
        return found

    def value(self, depth: int) -> Any:
        first = self.peek()
        if depth < 0:
            raise ValueError(f"arguments are nested deeper than {MAX_DEPTH} levels")
        if self.take("{"):
            return self.items("}", ":", self.string, depth)
        if self.take("["):
            found = []
            while not self.take("]"):
                found.append(self.value(depth - 1))
                if not self.take(",") and self.peek() != "]":
                    raise ValueError("a comma is missing")
            return found
        if first in "'\"":
            return self.string()
        if (number := _NUMBER.match(self.text, self.at)) is not None:
            self.at = number.end()
            self.peek()  # more digits may follow
            return json.loads(number[0]) if re.fullmatch(r"-?(0|[1-9]\d*)", number[0]) else float(number[0])
        name = self.name()
        if name not in _CONSTANTS:
            raise ValueError(f"{name!r:.40} is no literal")
        return _CONSTANTS[name]

    def string(self) -> str:
        self.peek()
        if (found := _TEXT.match(self.text, self.at)) is None:
            if self.text[self.at] in "'\"" and "\n" not in self.text[self.at :]:
                raise Incomplete
            raise ValueError("a text is missing")
        self.at = found.end()
        return ast.literal_eval(found[0])


def read(text: str) -> Read | None:
    """Returns the calls of a list; see `ToolParser.read`."""
    begin = next((tag for tag in TAGS if text.startswith(tag)), "")
    source, calls, end = Literals(text, len(begin)), [], TAGS.get(begin, "")
    try:
        source.expect("[")
        while not source.take("]"):
            calls.append(source.call())
            source.take(",")
    except Incomplete:
        return None
    if not calls:
        raise ValueError("a list without calls")
    return (calls, source.at + len(end)) if text.startswith(end, source.at) else None


PYTHONIC = ToolParser(
    templates=("<|tool_call_start|>", "<|python_start|>", "[func_name1(params_name1"),
    starts=(*TAGS, "["),
    end="]",  # and the tag after it
    read=read,
    form=None,
    anywhere=False,
)
