"""Values with parts: prompts, messages, biases. Each has a schema and a reader. Knows JSON values, no engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.checks import shown
from ksana_jax.core.request import MAX_LOGIT_BIASES
from ksana_jax.serve.server.errors import bad_request
from ksana_jax.serve.server.schema import NULL, Schema, as_integer, integer, list_of, number, object_of, present
from ksana_jax.tokenizers.messages import check_calls, content_text

MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_NAME_CHARS = 256
# Token ids of a prompt, characters of a text or of all contents of a conversation.
MAX_IDS = 2**18
MAX_CHARS = 8 * 2**20
LARGEST = 2**31 - 1
ROLES = ("system", "developer", "user", "assistant", "tool")
# Keys of an assistant's message in an earlier answer, which clients send back as they got them.
_EMPTY_KEYS = ("refusal", "annotations", "audio", "function_call", "reasoning_content", "reasoning")
_NAMES = ("name", "tool_call_id")

_TEXT: Schema = {"type": "string", "maxLength": MAX_CHARS}
_IDS = list_of(integer(0, LARGEST), MAX_IDS, 1)
PROMPTS: Schema = {"anyOf": [_TEXT, list_of(_TEXT, MAX_PROMPTS, 1), _IDS, list_of(_IDS, MAX_PROMPTS, 1)]}
LOGIT_BIAS: Schema = {
    "type": "object",
    "maxProperties": MAX_LOGIT_BIASES,
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
    "additionalProperties": number(-100, 100),
}
_PART = object_of({"type": {"enum": ["text"]}, "text": _TEXT, "cache_control": {}}, required=("type", "text"))
_FUNCTION = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object", "null"]}},
    "required": ["name"],
}
_CALL = {"type": "object", "properties": {"function": _FUNCTION}, "required": ["function"]}
_MESSAGE = object_of(
    {
        "role": {"enum": [*ROLES]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}, NULL]},
        "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, NULL]},
        **{key: {"type": ["string", "null"], "maxLength": MAX_NAME_CHARS} for key in _NAMES},
        **{key: {"enum": [None, [], ""]} for key in _EMPTY_KEYS},
    },
    required=("role",),
)
MESSAGES = list_of(_MESSAGE, MAX_MESSAGES, 1)


def read_logit_bias(name: str, value: Any) -> dict[int, float]:
    """Returns {token id: bias}; raises APIError, status 400, as all readers of values."""
    if not isinstance(value, dict):
        raise bad_request(f"{name} is {shown(value)}, must be an object", name)
    if len(value) > MAX_LOGIT_BIASES:
        raise bad_request(f"{name} has {len(value):,} entries, must have at most {MAX_LOGIT_BIASES:,}", name)
    found = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= LARGEST):
            raise bad_request(f"{name} has key {key!r:.80}, must be a token id from 0 to {LARGEST:,}", name)
        if problem := checks.number(f"{name}[{key}]", bias, -100, 100):
            raise bad_request(problem, name)
        if int(key) in found:
            raise bad_request(f"{name} has token id {int(key)} twice", name)
        found[int(key)] = bias
    return found


def read_prompts(name: str, value: Any) -> list[str | np.ndarray]:
    """Returns a list of texts or of token ids, int32 [n], of one of them or a list."""
    if isinstance(value, str):
        return [_read_text(name, value)]
    if not isinstance(value, list) or not value:
        raise bad_request(
            f"{name} is {shown(value)}, must be a text, token ids, or a list of one of those with an entry", name
        )
    if not isinstance(value[0], (str, list)):
        return [_read_ids(name, name, value)]
    if len(value) > MAX_PROMPTS:
        raise bad_request(f"{name} has {len(value):,} prompts, must have at most {MAX_PROMPTS:,}", name)
    read: list[str | np.ndarray] = []
    for index, one in enumerate(value):
        place = f"{name}[{index}]"
        if type(one) is not type(value[0]):
            kind = "a text" if isinstance(value[0], str) else "a list of token ids"
            raise bad_request(f"{place} is {shown(one)}, must be {kind} as {name}[0] is", name)
        read.append(_read_text(name, one) if isinstance(one, str) else _read_ids(name, place, one))
    return read


def _read_text(name: str, text: str) -> str:
    if len(text) > MAX_CHARS:
        raise bad_request(f"{name} has {len(text):,} characters, must have at most {MAX_CHARS:,}", name)
    return text


def _read_ids(name: str, place: str, ids: list[Any]) -> np.ndarray:
    if len(ids) > MAX_IDS:
        raise bad_request(f"{place} has {len(ids):,} token ids, must have at most {MAX_IDS:,}", name)
    if float in set(map(type, ids)):
        ids = [as_integer(token) for token in ids]
    if not checks.are_integers(ids, 0, LARGEST):
        index, wrong = next((i, v) for i, v in enumerate(ids) if checks.integer("", v, 0, LARGEST))
        raise bad_request(f"{place}[{index}] is {shown(wrong)}, must be a token id from 0 to {LARGEST:,}", name)
    return np.array(ids, np.int32)


def read_messages(name: str, value: Any) -> list[dict[str, Any]]:
    """Returns a conversation as in OpenAI's API, with texts as contents; see `tokenizers.messages`."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        what = f"{len(value):,} messages" if isinstance(value, list) else shown(value)
        raise bad_request(f"{name} is {what}, must be a list of 1 to {MAX_MESSAGES:,} messages", name)
    try:
        messages = [_read_message(f"{name}[{index}]", message) for index, message in enumerate(value)]
    except ValueError as error:
        raise bad_request(str(error), name) from None
    if (chars := sum(len(message.get("content") or "") for message in messages)) > MAX_CHARS:
        raise bad_request(f"{name} has {chars:,} characters, must have at most {MAX_CHARS:,}", name)
    return messages


def _read_message(place: str, message: Any) -> dict[str, Any]:
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
