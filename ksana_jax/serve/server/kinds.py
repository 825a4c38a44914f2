"""Kinds of values that fields of a request may have: each reads a value, and describes itself as a JSON schema.

One source for validation and documentation (`openapi`). Knows JSON values, no engine.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ksana_jax.core import checks
from ksana_jax.core.checks import shown
from ksana_jax.serve.server.errors import bad_request


class Kind(Protocol):
    """A kind of value."""

    def read(self, name: str, value: Any) -> Any:
        """Returns the value as the server uses it.

        Raises:
          APIError: status 400, with name, value and limit.
        """
        ...

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the values that `read` accepts."""
        ...


def _require(name: str, problem: str | None) -> None:
    if problem is not None:
        raise bad_request(problem.replace("True or False", "true or false").replace("None", "null"), _field(name))


def present(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object without what is null: null means absent, whatever the key."""
    return {key: given for key, given in value.items() if given is not None}


def as_integer(value: Any) -> Any:
    """Returns 16 for 16.0, which JSON does not tell apart, and any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _field(name: str) -> str:
    """Returns the field of a name such as stop[2] or stream_options.include_usage."""
    return re.split(r"[.\[]", name, maxsplit=1)[0]


@dataclasses.dataclass(frozen=True)
class Integer:
    low: int
    high: int

    def read(self, name: str, value: Any) -> int:
        value = as_integer(value)
        _require(name, checks.integer(name, value, self.low, self.high))
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclasses.dataclass(frozen=True)
class Number:
    """above: exclusive bound instead of low."""

    low: float | None
    high: float
    above: float | None = None

    def read(self, name: str, value: Any) -> float:
        _require(name, checks.number(name, value, self.low, self.high, above=self.above))
        return value

    def schema(self) -> dict[str, Any]:
        low = {"minimum": self.low} if self.above is None else {"exclusiveMinimum": self.above}
        return {"type": "number", **low, "maximum": self.high}


@dataclasses.dataclass(frozen=True)
class Boolean:
    def read(self, name: str, value: Any) -> bool:
        _require(name, checks.boolean(name, value))
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclasses.dataclass(frozen=True)
class Text:
    """A string of `low` to `high` characters."""

    high: int
    low: int = 0

    def read(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise bad_request(f"{name} is {shown(value)}, must be a string", _field(name))
        if not self.low <= len(value) <= self.high:
            raise bad_request(
                f"{name} has {len(value):,} characters, must have {self.low:,} to {self.high:,}", _field(name)
            )
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": self.low, "maxLength": self.high}


@dataclasses.dataclass(frozen=True)
class ListOf:
    """A list of `low` to `high` values of a kind; one value outside a list too, if `or_one`."""

    kind: Kind
    high: int
    low: int = 0
    or_one: bool = False

    def read(self, name: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            if self.or_one:
                return [self.kind.read(name, value)]
            raise bad_request(f"{name} is {shown(value)}, must be a list", _field(name))
        if not self.low <= len(value) <= self.high:
            raise bad_request(
                f"{name} has {len(value):,} entries, must have {self.low:,} to {self.high:,}", _field(name)
            )
        if isinstance(self.kind, Integer) and checks.are_integers(value, self.kind.low, self.kind.high):
            return value
        return [self.kind.read(f"{name}[{index}]", entry) for index, entry in enumerate(value)]

    def schema(self) -> dict[str, Any]:
        items = {"type": "array", "items": self.kind.schema(), "minItems": self.low, "maxItems": self.high}
        return {"anyOf": [self.kind.schema(), items]} if self.or_one else items


@dataclasses.dataclass(frozen=True)
class Only:
    """Values that change nothing, of a field that is not supported otherwise.

    Args:
      values: those accepted besides null.
      why: the end of the error's message.
    """

    values: Sequence[Any]
    why: str

    def read(self, name: str, value: Any) -> None:
        # 1.0 is 1 in JSON, and True is not.
        if not any(isinstance(value, bool) is isinstance(same, bool) and value == same for same in self.values):
            raise bad_request(f"{name} is {shown(value)}: {self.why}", _field(name), "unsupported_parameter")

    def schema(self) -> dict[str, Any]:
        return {"enum": [*self.values, None]}


@dataclasses.dataclass(frozen=True)
class Ignored:
    """Any value of a JSON type, for a field that concerns the client's records and no output."""

    type: str

    def read(self, name: str, value: Any) -> None:
        kinds = {"string": str, "object": dict, "boolean": bool}
        if not isinstance(value, kinds[self.type]):
            raise bad_request(f"{name} is {shown(value)}, must be of type {self.type}", _field(name))

    def schema(self) -> dict[str, Any]:
        return {"type": self.type}
