"""Kinds of values with parts: prompts, messages, biases, objects. Knows JSON values, no engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.checks import shown
from ksana_jax.serve.server.errors import bad_request
from ksana_jax.serve.server.kinds import Kind, as_integer, present
from ksana_jax.tokenizers.messages import check_calls, content_text

ROLES = ("system", "developer", "user", "assistant", "tool")
# Keys of an assistant's message in an earlier answer, which clients send back as they got them.
_EMPTY_KEYS = ("refusal", "annotations", "audio", "function_call", "reasoning_content", "reasoning")
_NAMES = ("name", "tool_call_id")
MAX_NAME_CHARS = 256


@dataclasses.dataclass(frozen=True)
class Object:
    """An object whose keys have kinds and a line of help each."""

    keys: Mapping[str, tuple[Kind, str]]

    def read(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise bad_request(f"{name} is {shown(value)}, must be an object", name)
        found = {}
        for key, given in present(value).items():
            if key not in self.keys:
                raise bad_request(f"{name} has unknown key {key!r:.80}, must be of {', '.join(self.keys)}", name)
            found[key] = self.keys[key][0].read(f"{name}.{key}", given)
        return found

    def schema(self) -> dict[str, Any]:
        keys = {
            key: {"anyOf": [kind.schema(), {"type": "null"}], "description": help}
            for key, (kind, help) in self.keys.items()
        }
        return {"type": "object", "properties": keys, "additionalProperties": {"type": "null"}}


@dataclasses.dataclass(frozen=True)
class AnyObject:
    """An object with any keys and values."""

    def read(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise bad_request(f"{name} is {shown(value)}, must be an object", name.partition("[")[0])
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "object"}


@dataclasses.dataclass(frozen=True)
class LogitBias:
    """{"token id": bias}, of at most `most` entries with ids up to `largest`."""

    most: int
    largest: int

    def read(self, name: str, value: Any) -> dict[int, float]:
        if not isinstance(value, dict):
            raise bad_request(f"{name} is {shown(value)}, must be an object", name)
        if len(value) > self.most:
            raise bad_request(f"{name} has {len(value):,} entries, must have at most {self.most:,}", name)
        found = {}
        for key, bias in value.items():
            if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= self.largest):
                raise bad_request(f"{name} has key {key!r:.80}, must be a token id from 0 to {self.largest:,}", name)
            if problem := checks.number(f"{name}[{key}]", bias, -100, 100):
                raise bad_request(problem, name)
            if int(key) in found:
                raise bad_request(f"{name} has token id {int(key)} twice", name)
            found[int(key)] = bias
        return found

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "maxProperties": self.most,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }


@dataclasses.dataclass(frozen=True)
class Prompts:
    """A text, a list of texts, a list of token ids or a list of such lists; read as a list of texts or int32 [n].

    Args:
      most: prompts. chars: characters of a text. ids: token ids of a prompt. largest: token id.
    """

    most: int
    chars: int
    ids: int
    largest: int

    def read(self, name: str, value: Any) -> list[str | np.ndarray]:
        if isinstance(value, str):
            return [self._text(name, value)]
        if not isinstance(value, list) or not value:
            raise bad_request(
                f"{name} is {shown(value)}, must be a text, token ids, or a list of one of those with an entry", name
            )
        if not isinstance(value[0], (str, list)):
            return [self._token_ids(name, name, value)]
        if len(value) > self.most:
            raise bad_request(f"{name} has {len(value):,} prompts, must have at most {self.most:,}", name)
        read: list[str | np.ndarray] = []
        for index, one in enumerate(value):
            place = f"{name}[{index}]"
            if type(one) is not type(value[0]):
                raise bad_request(f"{place} is {shown(one)}, must be {_kind(value[0])} as {name}[0] is", name)
            read.append(self._text(name, one) if isinstance(one, str) else self._token_ids(name, place, one))
        return read

    def _text(self, name: str, text: str) -> str:
        if len(text) > self.chars:
            raise bad_request(f"{name} has {len(text):,} characters, must have at most {self.chars:,}", name)
        return text

    def _token_ids(self, name: str, place: str, ids: list[Any]) -> np.ndarray:
        if len(ids) > self.ids:
            raise bad_request(f"{place} has {len(ids):,} token ids, must have at most {self.ids:,}", name)
        if float in set(map(type, ids)):
            ids = [as_integer(token) for token in ids]
        if not checks.are_integers(ids, 0, self.largest):
            index, wrong = next((i, v) for i, v in enumerate(ids) if checks.integer("", v, 0, self.largest))
            raise bad_request(
                f"{place}[{index}] is {shown(wrong)}, must be a token id from 0 to {self.largest:,}", name
            )
        return np.array(ids, np.int32)

    def schema(self) -> dict[str, Any]:
        text = {"type": "string", "maxLength": self.chars}
        token = {"type": "integer", "minimum": 0, "maximum": self.largest}
        ids = {"type": "array", "items": token, "minItems": 1, "maxItems": self.ids}
        texts, lists = ({"type": "array", "items": kind, "minItems": 1, "maxItems": self.most} for kind in (text, ids))
        return {"anyOf": [text, texts, ids, lists]}


def _kind(value: Any) -> str:
    return "a text" if isinstance(value, str) else "a list of token ids"


@dataclasses.dataclass(frozen=True)
class Messages:
    """A conversation as in OpenAI's API, read with texts as contents; see `tokenizers.messages`.

    Args:
      most: messages. chars: characters of all contents together.
    """

    most: int
    chars: int

    def read(self, name: str, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not 1 <= len(value) <= self.most:
            what = f"{len(value):,} messages" if isinstance(value, list) else shown(value)
            raise bad_request(f"{name} is {what}, must be a list of 1 to {self.most:,} messages", name)
        try:
            messages = [self._message(f"{name}[{index}]", message) for index, message in enumerate(value)]
        except ValueError as error:
            raise bad_request(str(error), name) from None
        if (chars := sum(len(message.get("content") or "") for message in messages)) > self.chars:
            raise bad_request(f"{name} has {chars:,} characters, must have at most {self.chars:,}", name)
        return messages

    def _message(self, place: str, message: Any) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise ValueError(f"{place} is {shown(message)}, must be an object with role and content")
        if (role := message.get("role")) not in ROLES:
            raise ValueError(f"{place}.role is {shown(role)}, must be one of {', '.join(ROLES)}")
        read: dict[str, Any] = {"role": role}
        for key, given in present(message).items():
            if key in ("role", "content"):
                continue
            if key == "tool_calls" and (role == "assistant" or given == []):
                check_calls(f"{place}.{key}", given)
                read |= {key: given} if given else {}
            elif key in _NAMES:
                if not isinstance(given, str) or len(given) > MAX_NAME_CHARS:
                    raise ValueError(f"{place}.{key} is {shown(given)}, must be a text of up to {MAX_NAME_CHARS}")
                read[key] = given
            elif key not in (*_EMPTY_KEYS, "tool_calls"):
                raise ValueError(f"{place} has unknown key {key!r:.80}")
            elif given not in ([], ""):
                raise ValueError(f"{place}.{key} is {shown(given)}: not supported in messages of role {role}")
        if message.get("content") is not None or "tool_calls" not in read:
            read["content"] = content_text(f"{place}.content", message.get("content"))
        elif "content" in message:  # some templates tell null from an absent content
            read["content"] = None
        return read

    def schema(self) -> dict[str, Any]:
        text = {"type": "string", "maxLength": self.chars}
        part = {
            "type": "object",
            "properties": {"type": {"enum": ["text"]}, "text": text, "cache_control": {}},
            "required": ["type", "text"],
            "additionalProperties": {"type": "null"},
        }
        function = {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object", "null"]}},
            "required": ["name"],
        }
        call = {"type": "object", "properties": {"function": function}, "required": ["function"]}
        message = {
            "type": "object",
            "properties": {
                "role": {"enum": list(ROLES)},
                "content": {"anyOf": [text, {"type": "array", "items": part, "minItems": 1}, {"type": "null"}]},
                "tool_calls": {"anyOf": [{"type": "array", "items": call}, {"type": "null"}]},
                **{key: {"type": ["string", "null"], "maxLength": MAX_NAME_CHARS} for key in _NAMES},
                **{key: {"enum": [None, [], ""]} for key in _EMPTY_KEYS},
            },
            "required": ["role"],
            "additionalProperties": {"type": "null"},
        }
        return {"type": "array", "items": message, "minItems": 1, "maxItems": self.most}
