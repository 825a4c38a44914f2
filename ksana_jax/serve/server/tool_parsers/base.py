"""The interface of parsers of tool calls. Knows texts, no requests and no models."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

# Stands for the name of the function in a `Form`.
NAME = "\0"


class Call(NamedTuple):
    """A tool call. arguments: the JSON text of an object."""

    name: str
    arguments: str


# Stands for reasoning that begins after what was read.
THINKS = Call("", "")
# Calls, and the number of characters that they take.
Read: TypeAlias = tuple[list[Call], int]


class Form(NamedTuple):
    """How calls whose arguments are JSON are written, for a grammar. begin: has NAME; before, after: of all calls."""

    begin: str
    end: str
    between: str
    before: str = ""
    after: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolParser:
    """How a family of models writes tool calls.

    Args:
      templates: texts, one of which a chat template of such a model has.
      starts: texts with which calls begin. anywhere: whether text may stand before them.
      end: text that every call has after its arguments; `read` is asked once it is there.
      read: returns the calls at the beginning of a text that has one of `starts` there, None while they are incomplete;
        raises ValueError if the text is no call.
      form: None if arguments are not written as JSON.
      separators: characters that are dropped after calls, like white space.
      typed: False if `read` returns all arguments as texts; the functions' schemas have their types.
      channels: header before the text of an answer whose every part has one; such calls are enforced alone only.
    """

    templates: tuple[str, ...]
    starts: tuple[str, ...]
    end: str
    read: Callable[[str], Read | None]
    form: Form | None
    anywhere: bool = True
    separators: str = ""
    typed: bool = True
    channels: str = ""


def call_of(value: Any, *keys: str) -> Call:
    """Returns the call in {"name": ..., "arguments": {...}}; raises ValueError if it is none.

    Args:
      keys: other names of "arguments".
    """
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        raise ValueError("a call has no name")
    return Call(name, arguments_of(next((value[key] for key in ("arguments", *keys) if key in value), None)))


def arguments_of(value: Any) -> str:
    """Returns arguments as the text of a JSON object, none as {}; raises ValueError if they are something else."""
    if isinstance(value, str):  # some models write the text of an object
        value, _ = json_at(value) or (value, 0)
    if value is not None and not isinstance(value, dict):
        raise ValueError("arguments are no object")
    text = json.dumps(value or {}, ensure_ascii=False, allow_nan=False)
    text.encode()  # half of a surrogate pair is no text
    return text


def with_types(call: Call, schema: Mapping[str, Any] | None) -> Call:
    """Returns a call whose arguments are texts with the types of its function's JSON Schema."""
    fields = (schema or {}).get("properties")
    fields = fields if isinstance(fields, dict) else {}
    return Call(call.name, arguments_of({k: _typed(v, fields.get(k)) for k, v in json.loads(call.arguments).items()}))


def _typed(text: str, schema: Any) -> Any:
    kinds = _KIND.findall(json.dumps(schema))
    try:
        value = text if schema is None else _DECODER.decode(LITERALS.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text
    kind = {dict: "object", list: "array", type(None): "null"}.get(type(value), "")
    # A schema without a type may be a reference to an object's.
    stays = ("string" in kinds or not kinds) and kind not in (kinds or ("object", "array"))
    return text if stays or isinstance(value, str) else value


def json_at(text: str, start: int = 0) -> tuple[Any, int] | None:
    """Returns the JSON value at a place, after white space, and its end; None while it is incomplete.

    Raises:
      ValueError: whatever follows, it is not JSON.
    """
    try:
        return _DECODER.raw_decode(text, len(text) - len(text[start:].lstrip()))
    except json.JSONDecodeError as error:
        # The last characters may be a part of \u00e9 or of false.
        if error.msg.startswith("Unterminated string") or error.pos > len(text) - 8:
            return None
        raise
    except RecursionError:
        raise ValueError("JSON is nested too deep") from None


_KIND = re.compile(r'"(string|null|object|array|integer|number|boolean)"')
LITERALS = {"True": "true", "False": "false", "None": "null"}


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
