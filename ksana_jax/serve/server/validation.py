"""The base of request models, and pydantic's errors in the words of this server. `request_models` has the fields."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from ksana_jax.core.checks import shown
from ksana_jax.serve.server.errors import APIError, bad_request

M = TypeVar("M", bound=BaseModel)

_RULES = {"missing": "is missing", "model_type": "must be an object", "dict_type": "must be an object"}
_UNSUPPORTED, _UNKNOWN = "unsupported_parameter", "unknown_parameter"
_CODES = {"missing": "missing_required_parameter", _UNSUPPORTED: _UNSUPPORTED, _UNKNOWN: _UNKNOWN}


class Body(BaseModel):
    """A JSON object of a request. A key that is null counts as absent, known or not; unknown keys are refused.

    Attributes:
      unsupported: fields of OpenAI's and vLLM's APIs that are refused, with the values that change nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[Mapping[str, Sequence[Any]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields, known = cls.model_fields, {}
        for name, value in given.items():
            if name in fields:
                if value is not None or fields[name].default is None:
                    known[name] = value
            elif value is None:
                continue
            elif name in cls.unsupported:
                # True is not 1.
                if not any(type(value) is type(one) and value == one for one in cls.unsupported[name]):
                    absent = " or ".join([*map(json.dumps, cls.unsupported[name]), "absent"])
                    about = {"key": name, "value": shown(value), "absent": absent}
                    raise PydanticCustomError(_UNSUPPORTED, "is {value}: not supported, must be {absent}", about)
            else:
                near = difflib.get_close_matches(name[:64], [*fields, *cls.unsupported], 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise PydanticCustomError(_UNKNOWN, "is an unknown field{hint}", {"key": name, "hint": hint})
        return known

    def refused(self, error: ValueError) -> APIError:
        """Returns an error of the engine as one of the field with which its message begins, if it is one."""
        first = re.split(r"[ .]", str(error), maxsplit=1)[0]
        return bad_request(str(error), first if first in type(self).model_fields else None)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        fields = schema.setdefault("properties", {})
        for name, field in fields.items():
            if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                about = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
                fields[name] = {**about, "anyOf": [field, {"type": "null"}]}
        for name, values in cls.unsupported.items():
            fields[name] = {"description": "not supported", "enum": [*values, None]}
        return {**schema, "additionalProperties": {"type": "null"}}


def validate(model: type[M], body: dict[str, Any]) -> M:
    """Returns the request in a body.

    Raises:
      APIError: status 400, about the first field that is wrong: its place, value and limit.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _as_bad_request(error.errors(include_url=False), body) from None


def _as_bad_request(errors: list[ErrorDetails], body: dict[str, Any]) -> APIError:
    # A union has an error for each member: the user meant the one that went furthest, and there not over the type.
    def progress(error: ErrorDetails) -> tuple[list[int], bool]:
        indices = [part for part in error["loc"] if isinstance(part, int)]
        return indices, not error["type"].endswith(("_type", "literal_error"))

    errors = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    furthest = max(map(progress, errors))
    rules = dict.fromkeys(_rule(error) for error in errors if progress(error) == furthest)
    error = next(error for error in errors if progress(error) == furthest)
    given, rule = error["input"], " or ".join(rules).replace(" or must be ", " or ")
    if rule.startswith("must have") and isinstance(given, (str, list, dict)):
        rule = f"has {len(given):,} {'characters' if isinstance(given, str) else 'entries'}, {rule}"
    elif rule.startswith("must"):
        rule = f"is {shown(given)}, {rule}"
    key = error.get("ctx", {}).get("key")
    path = error["loc"] if key is None else (*error["loc"], key)
    place = _place(path, body, missing=error["type"] == "missing")
    return bad_request(f"{place} {rule}", str(path[0])[:80], _CODES.get(error["type"]))


def _rule(error: ErrorDetails) -> str:
    text = re.sub(r"^\w+ should ", "must ", error["msg"]).partition(" after validation")[0]
    return _RULES.get(error["type"], re.sub(r"(?<![.\d])\d{4,}", lambda digits: f"{int(digits[0]):,}", text))


def _place(path: Sequence[str | int], body: Any, missing: bool) -> str:
    """Returns a path as messages[0].role, without the members of unions in it. missing: whether the body lacks it."""
    place = ""
    for part in path:
        if isinstance(part, int):
            place, body = f"{place}[{part}]", body[part]
        elif isinstance(body, dict) and (part in body or missing):
            place, body = f"{place}.{part:.80}".removeprefix("."), body.get(part, {})
    return place
