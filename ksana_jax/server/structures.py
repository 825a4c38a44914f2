"""Kinds of values with parts: prompts, messages, biases, objects. Knows JSON values, no engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ksana_jax import checks
from ksana_jax.checks import shown
from ksana_jax.server.errors import bad_request
from ksana_jax.server.kinds import Kind

ROLES = ("system", "developer", "user", "assistant")
# Keys of an assistant's message in an earlier answer, which clients send back as they got them.
_EMPTY_KEYS = ("refusal", "annotations", "audio", "tool_calls", "function_call", "reasoning_content", "reasoning")
ONLY_TEXT = "only text content is supported"


@dataclasses.dataclass(frozen=True)
class Object:
    """An object whose keys have kinds and a line of help each; null means absent."""

    keys: Mapping[str, tuple[Kind, str]]

    def read(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise bad_request(f"{name} is {shown(value)}, must be an object", name)
        found = {}
        for key, given in value.items():
            if key not in self.keys:
                raise bad_request(f"{name} has unknown key {key!r:.80}, must be of {', '.join(self.keys)}", name)
            if given is not None:
                found[key] = self.keys[key][0].read(f"{name}.{key}", given)
        return found

    def schema(self) -> dict[str, Any]:
        keys = {
            key: {"anyOf": [kind.schema(), {"type": "null"}], "description": help}
            for key, (kind, help) in self.keys.items()
        }
        return {"type": "object", "properties": keys, "additionalProperties": False}


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
        if set(map(type, ids)) - {int} or (ids and not 0 <= min(ids) <= max(ids) <= self.largest):
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
    """A conversation: [{"role": ..., "content": text or [{"type": "text", "text": ...}]}], read with texts as contents.

    Args:
      most: messages. chars: characters of all contents together.
    """

    most: int
    chars: int

    def read(self, name: str, value: Any) -> list[dict[str, str]]:
        if not isinstance(value, list) or not 1 <= len(value) <= self.most:
            what = f"{len(value):,} messages" if isinstance(value, list) else shown(value)
            raise bad_request(f"{name} is {what}, must be a list of 1 to {self.most:,} messages", name)
        messages = [self._message(name, f"{name}[{index}]", message) for index, message in enumerate(value)]
        if (chars := sum(len(message["content"]) for message in messages)) > self.chars:
            raise bad_request(f"{name} has {chars:,} characters, must have at most {self.chars:,}", name)
        return messages

    def _message(self, name: str, place: str, message: Any) -> dict[str, str]:
        if not isinstance(message, dict):
            raise bad_request(f"{place} is {shown(message)}, must be an object with role and content", name)
        if (role := message.get("role")) not in ROLES:
            raise bad_request(f"{place}.role is {shown(role)}, must be one of {', '.join(ROLES)}", name)
        read = {"role": role, "content": self._content(name, f"{place}.content", message.get("content"))}
        for key, given in message.items():
            if key in read or given is None:
                continue
            if key == "name" and isinstance(given, str) and len(given) <= 256:
                read["name"] = given
            elif key not in _EMPTY_KEYS or given not in ([], ""):
                raise bad_request(f"{place} has key {key!r:.80} with {shown(given)}: {ONLY_TEXT}", name)
        return read

    def _content(self, name: str, place: str, content: Any) -> str:
        if isinstance(content, str):
            return content
        if not isinstance(content, list) or not content:
            raise bad_request(f"{place} is {shown(content)}, must be a text or a list of parts of type text", name)
        texts = []
        for index, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else part
                raise bad_request(f"{place}[{index}] is of type {shown(kind)}: {ONLY_TEXT}", name)
            if set(part) != {"type", "text"} or not isinstance(part["text"], str):
                raise bad_request(f"{place}[{index}] must have the keys type and text, a string, and no others", name)
            texts.append(part["text"])
        return "\n".join(texts)

    def schema(self) -> dict[str, Any]:
        text = {"type": "string", "maxLength": self.chars}
        part = {
            "type": "object",
            "properties": {"type": {"enum": ["text"]}, "text": text},
            "required": ["type", "text"],
            "additionalProperties": False,
        }
        message = {
            "type": "object",
            "properties": {
                "role": {"enum": list(ROLES)},
                "content": {"anyOf": [text, {"type": "array", "items": part, "minItems": 1}]},
                "name": {"type": ["string", "null"], "maxLength": 256},
                **{key: {"enum": [None, [], ""]} for key in _EMPTY_KEYS},
            },
            "required": ["role", "content"],
            "additionalProperties": False,
        }
        return {"type": "array", "items": message, "minItems": 1, "maxItems": self.most}
