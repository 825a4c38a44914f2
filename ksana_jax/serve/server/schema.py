"""JSON schemas of values in requests, and the reading of values by them. Knows JSON values, no fields.

One source for validation and documentation (`openapi`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.checks import shown
from ksana_jax.serve.server.errors import bad_request

Schema = dict[str, Any]
NULL: Schema = {"type": "null"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}


class Only(dict):
    """Schema of a field that is not supported: null, and values that change nothing.

    Args:
      why: the end of the error's message for other values.
    """

    def __init__(self, *values: Any, why: str):
        super().__init__(enum=[*values, None])
        self.why = why


class Ignored(dict):
    """Schema of a field for the client's records that changes no output: any value of a JSON type."""

    def __init__(self, type: str):
        super().__init__(type=type)


def integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def text(high: int, low: int = 0) -> Schema:
    """Returns the schema of a string of `low` to `high` characters."""
    return {"type": "string", "minLength": low, "maxLength": high}


def list_of(items: Schema, high: int, low: int = 0) -> Schema:
    """Returns the schema of a list of `low` to `high` values."""
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def one_or_list_of(items: Schema, high: int) -> Schema:
    """Returns the schema of a list, or of one value, which is read as a list."""
    return {"anyOf": [items, list_of(items, high)]}


def optional(schema: Schema, help: str) -> Schema:
    """Returns the schema of a key that may be null, with a line of help."""
    return {"anyOf": [schema, NULL], "description": help}


def object_of(properties: Mapping[str, Schema], required: tuple[str, ...] = ()) -> Schema:
    """Returns the schema of an object; other keys may only be null."""
    needed = {"required": [*required]} if required else {}
    return {"type": "object", "properties": dict(properties), **needed, "additionalProperties": NULL}


def read_value(name: str, value: Any, schema: Schema) -> Any:
    """Returns a value as the server uses it: 16 for 16.0, objects without null, None if it has no effect.

    Raises:
      APIError: status 400, with name, value and limit.
    """
    match schema:
        case Only():
            # 1.0 is 1 in JSON, and True is not.
            same = (isinstance(value, bool) is isinstance(one, bool) and value == one for one in schema["enum"])
            if not any(same):
                raise bad_request(f"{name} is {shown(value)}: {schema.why}", _field(name), "unsupported_parameter")
            return None
        case Ignored():
            kind = schema["type"]
            _require_type(name, value, {"string": str, "object": dict, "boolean": bool}[kind], f"of type {kind}")
            return None
        case {"anyOf": [one, {"type": "null"}]}:
            return read_value(name, value, one)
        case {"anyOf": [one, many]}:
            return read_value(name, value, many) if isinstance(value, list) else [read_value(name, value, one)]
        case {"type": "integer", "minimum": low, "maximum": high}:
            value = as_integer(value)
            _require(name, checks.integer(name, value, low, high))
        case {"type": "number", "maximum": high}:
            low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
            _require(name, checks.number(name, value, low, high, above=above))
        case {"type": "boolean"}:
            _require(name, checks.boolean(name, value))
        case {"type": "string", "minLength": low, "maxLength": high}:
            _require_type(name, value, str, "a string")
            _require_length(name, value, "characters", low, high)
        case {"type": "array", "items": items, "minItems": low, "maxItems": high}:
            _require_type(name, value, list, "a list")
            _require_length(name, value, "entries", low, high)
            if items.get("type") == "integer" and checks.are_integers(value, items["minimum"], items["maximum"]):
                return value
            return [read_value(f"{name}[{index}]", entry, items) for index, entry in enumerate(value)]
        case {"type": "object"}:
            _require_type(name, value, dict, "an object")
            if (keys := schema.get("properties")) is not None:
                return {key: _read_key(name, key, given, keys) for key, given in present(value).items()}
    return value


def _read_key(name: str, key: str, value: Any, keys: Mapping[str, Schema]) -> Any:
    if key not in keys:
        raise bad_request(f"{name} has unknown key {key!r:.80}, must be of {', '.join(keys)}", name)
    return read_value(f"{name}.{key}", value, keys[key])


def _require(name: str, problem: str | None) -> None:
    if problem is not None:
        raise bad_request(problem.replace("True or False", "true or false").replace("None", "null"), _field(name))


def _require_type(name: str, value: Any, kind: type, words: str) -> None:
    if not isinstance(value, kind):
        raise bad_request(f"{name} is {shown(value)}, must be {words}", _field(name))


def _require_length(name: str, value: Any, of: str, low: int, high: int) -> None:
    if not low <= len(value) <= high:
        raise bad_request(f"{name} has {len(value):,} {of}, must have {low:,} to {high:,}", _field(name))


def present(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object without nulls: null means absent for every key."""
    return {key: given for key, given in value.items() if given is not None}


def as_integer(value: Any) -> Any:
    """Returns 16 for 16.0, which JSON does not distinguish, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _field(name: str) -> str:
    """Returns the field of a name such as stop[2] or stream_options.include_usage."""
    return re.split(r"[.\[]", name, maxsplit=1)[0]
