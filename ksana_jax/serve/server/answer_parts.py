"""Divides an answer, piece by piece, into reasoning, text and tool calls. Knows tags and parsers, no requests."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from ksana_jax.serve.server.tool_parsers.base import THINKS, Call, ToolParser, with_types

# Tags around the reasoning of models, by a mark of their chat templates.
TAGS = {
    "</think>": ("<think>", "</think>"),
    "[/THINK]": ("[THINK]", "[/THINK]"),
    "<|channel>thought": ("<|channel>thought", "<channel|>"),
    "<|channel|>analysis": ("<|channel|>analysis<|message|>", "<|end|>"),
}
# Longer calls stay text: each piece of one parses it again.
MAX_CALL_CHARS = 2**16


class Text(NamedTuple):
    """A piece of an answer's text or reasoning."""

    kind: Literal["content", "reasoning_content"]
    text: str


Part: TypeAlias = Text | Call


def thinking_tags(template: str, prompt: str) -> tuple[str, str] | None:
    """Returns the tags around the reasoning of an answer, the first one empty if the prompt ends with it.

    Args:
      template: that the prompt was written with.

    Returns:
      None if the template has no such tags, or the prompt ends with reasoning that is over.
    """
    tags = next((tags for mark, tags in TAGS.items() if mark in template), None)
    if tags is None or (end := prompt.rstrip()).endswith(tags[1]):
        return None
    return ("", tags[1]) if end.endswith(tags[0]) else tags


class AnswerParts:
    """The parts of one answer. What may become a call or a tag is held back; what is none stays text.

    Args:
      thinking: as `thinking_tags` returns them.
      parser: of tool calls; None leaves them text.
      tools: schemas of arguments, None for any, by the names of functions; a call of another one stays text.
      several: whether calls after the first one are kept.
    """

    def __init__(
        self,
        thinking: tuple[str, str] | None,
        parser: ToolParser | None = None,
        tools: Mapping[str, Mapping[str, Any] | None] | None = None,
        several: bool = True,
    ):
        self._thinking, self._parser, self._tools, self._several = thinking, parser, tools or {}, several
        self._start = None if parser is None else re.compile("|".join(map(re.escape, parser.starts)))
        self._held, self._num_read = "", 0
        self._is_thinking = thinking is not None and not thinking[0]
        self._is_first = self._is_opening = thinking is not None
        self._began = thinking is None and parser is None  # white space is held until text or a call begins
        self.num_calls = 0

    def feed(self, text: str, last: bool = False) -> list[Part]:
        """Returns the parts that are complete with more text; last: whether the answer ends with it."""
        self._held += text
        if self._is_first and not self._is_thinking:
            self._find_thinking(last)
        found: list[Part] = []
        left = -1
        while len(self._held) != left:
            left = len(self._held)
            if self._is_thinking:
                found += self._reasoning(last)
            elif not self._is_first:
                found += self._content(last)
        return found

    def _find_thinking(self, last: bool) -> None:
        begin, text = self._thinking[0] if self._thinking else "", self._held.lstrip()
        if text.startswith(begin):
            self._is_thinking, self._held = True, text[len(begin) :]
        elif last or not begin.startswith(text):
            self._is_first = False

    def _reasoning(self, last: bool) -> list[Part]:
        end = self._thinking[1] if self._thinking else ""
        text, closed, rest = self._held.partition(end)
        if closed:
            self._is_first, self._is_thinking, self._held = False, False, rest
            text = text.rstrip()
        else:
            count = 0 if last else _overlap(text, (end,))
            count = len(text[: len(text) - count].rstrip())
            text, self._held = text[:count], text[count:]
        if self._is_opening:
            text = text.lstrip()
            self._is_opening = not text
        return [Text("reasoning_content", text)] if text else []

    def _content(self, last: bool) -> list[Part]:
        """Returns the next parts of what is held, none if it must wait."""
        parser, start = self._parser, ""
        if not self._began and (self._thinking or self.num_calls):
            self._held = self._held.lstrip(" \t\r\n" + ("" if parser is None else parser.separators))
        held = self._held
        at, first = len(held), len(held) - len(held.lstrip())
        if parser is not None and self._start is not None and (parser.anywhere or not self._began):
            found = self._start.search(held) if parser.anywhere else self._start.match(held, first)
            if found is not None:
                at, start = found.start(), found[0]
            elif not last and (parser.anywhere or any(one.startswith(held[first:]) for one in parser.starts)):
                at -= _overlap(held, parser.starts)
        if count := len(held[:at].rstrip()):  # white space before a call is dropped with it
            return self._emit(count)
        if parser is not None and start:
            return self._calls(parser, at, start, last)
        return self._emit(at) if last else []

    def _calls(self, parser: ToolParser, at: int, start: str, last: bool) -> list[Part]:
        """Returns the calls that begin at a place of what is held, or its start as text."""
        text, calls = self._held[at:], None
        try:
            if last or parser.end in text[max(self._num_read - len(parser.end), 0) :]:
                calls = parser.read(text)
            if calls is not None and not parser.typed:
                calls = [with_types(call, self._tools.get(call.name)) for call in calls[0]], calls[1]
        except Exception:  # ValueError; and no fault of a parser ends a stream
            calls, last = None, True
        self._num_read = len(text)
        known = calls is not None and all(
            call.name in self._tools or (call is THINKS and self._thinking) for call in calls[0]
        )
        if calls is not None and known and calls[1] <= MAX_CALL_CHARS:
            found, count = calls
            self._held, self._num_read, self._began = text[count:], 0, False
            if found == [THINKS]:
                self._is_thinking = self._is_opening = True
                return []
            found = found if self._several else found[: 1 - min(self.num_calls, 1)]
            self.num_calls += len(found)
            return [*found]
        if calls is None and not last and len(text) <= MAX_CALL_CHARS:
            return []
        return self._emit(at + len(start))

    def _emit(self, count: int) -> list[Part]:
        text, self._held, self._num_read = self._held[:count], self._held[count:], 0
        self._began = self._began or bool(text)
        return [Text("content", text)] if text else []


def _overlap(text: str, starts: Collection[str]) -> int:
    """Returns the number of characters at the end of a text that begin one of `starts`."""
    most = min(max(map(len, starts)) - 1, len(text))
    return next((n for n in range(most, 0, -1) if any(one.startswith(text[-n:]) for one in starts)), 0)


def call_json(call: Call) -> dict[str, Any]:
    """Returns a call for an answer. Mistral's templates take ids of nine letters and digits."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}


def deltas_of(parts: Sequence[Part], num_calls: int) -> list[dict[str, Any]]:
    """Returns the deltas of a stream that has had `num_calls` calls; a call is one delta."""
    deltas: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Text):
            deltas.append({part.kind: part.text})
        else:
            deltas.append({"tool_calls": [{"index": num_calls, **call_json(part)}]})
            num_calls += 1
    return deltas


def message_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Returns a whole answer as a message."""
    texts = {"content": "", "reasoning_content": ""}
    for part in parts:
        if isinstance(part, Text):
            texts[part.kind] += part.text
    calls = [call_json(part) for part in parts if isinstance(part, Call)]
    reasoning = {"reasoning_content": texts["reasoning_content"]} if texts["reasoning_content"] else {}
    content = texts["content"] or (None if calls or reasoning else "")
    return {"role": "assistant", "content": content, **reasoning, **({"tool_calls": calls} if calls else {})}
