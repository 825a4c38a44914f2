"""Checks chat messages and gives them the form that chat templates expect. Knows no templates."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ksana_jax.tokenizers.files import one_line

# Longer arguments of a tool call stay text: parsing holds the interpreter.
MAX_ARGUMENT_CHARS = 2**16
MAX_DEPTH = 32


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns messages as chat templates take them.

    Contents become texts, see `content_text`; with tool_calls, content may be None or absent. As in vLLM, an empty
    list of tool_calls is dropped, and arguments, which OpenAI's API has as text, become the JSON object of that text.

    Raises:
      ValueError: messages have another form, or hold a value that JSON has not.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages is {one_line(repr(messages), 60)}, must be a list of at least one message")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(place: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place} is {type(message).__name__}, must be a dict with role and content")
    if "role" not in message:
        raise ValueError(f"{place} has no role")
    if not isinstance(message["role"], str):
        raise ValueError(f"{place} 'role' is {type(message['role']).__name__}, must be a string")
    read = {**message}
    if calls := read.pop("tool_calls", None):
        check_calls(f"{place}.tool_calls", calls)
        read["tool_calls"] = [call | {"function": _with_object(call["function"])} for call in calls]
    elif "content" not in message:
        raise ValueError(f"{place} has no content")
    if read.get("content") is not None or not calls:
        read["content"] = content_text(f"{place}.content", message["content"])
    check_plain(place, read)
    return read


def content_text(place: str, content: Any) -> str:
    """Returns the text of a message's content: a text, or parts of type text, which are joined by line breaks.

    Raises:
      ValueError: content is something else.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)) or not content:
        raise ValueError(f"{place} is {one_line(repr(content), 60)}, must be a text or a list of parts of type text")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ValueError(f"{place}[{index}] is of type {kind!r:.60}: only text content is supported")
        # Other services read cache_control; here prefixes are cached without it.
        others = [key for key in part if key not in ("type", "text", "cache_control") and part[key] is not None]
        if others:
            raise ValueError(
                f"{place}[{index}] has unknown key {others[0]!r:.80}, must be of type, text, cache_control"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{place}[{index}].text is {one_line(repr(part.get('text')), 60)}, must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def check_calls(place: str, calls: Any) -> None:
    """Checks that tool calls of a message have the form of OpenAI's; raises ValueError."""
    if not isinstance(calls, (list, tuple)):
        raise ValueError(f"{place} is {one_line(repr(calls), 60)}, must be a list")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{place}[{index}] must be an object whose function has a name")
        if not isinstance(function.get("arguments"), (str, dict, type(None))):
            raise ValueError(f"{place}[{index}].function.arguments must be the text of a JSON object")


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    """Returns the function of a call, its arguments as an object if they are the text of one."""
    given = function.get("arguments") or {}
    if isinstance(given, str) and len(given) <= MAX_ARGUMENT_CHARS:
        with contextlib.suppress(ValueError, RecursionError):  # a model may have written invalid JSON
            found = json.loads(given)
            given = found if isinstance(found, dict) else given
    return function | {"arguments": given}


def check_tools(tools: Any) -> None:
    """Checks tools, each a dict as in OpenAI's API, for a template to show; raises ValueError."""
    if not isinstance(tools, (list, tuple)):
        raise ValueError(f"tools is {one_line(repr(tools), 60)}, must be a list")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            form = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            raise ValueError(f"tools[{index}] is {type(tool).__name__}, must be a dict: {form}")
    check_plain("tools", tools)


def check_plain(place: str, value: Any, depth: int = MAX_DEPTH) -> None:
    """Checks that a value is one of JSON: a template gets no objects with methods of their own.

    Raises:
      ValueError: it is something else, or nested deeper than `depth`.
    """
    if value is None or isinstance(value, (str, int, float)):
        return
    if not depth:
        raise ValueError(f"{place:.80} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{place:.80} has key {key!r:.40}, must be a string")
            check_plain(f"{place:.80}.{key:.40}", item, depth - 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_plain(f"{place:.80}[{index}]", item, depth - 1)
    else:
        raise ValueError(f"{place:.80} is {type(value).__name__}, must be a text, a number, a list or a dict")
