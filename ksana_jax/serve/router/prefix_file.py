"""Reads a file of prefixes for the policy prefix_table: JSON lines. Knows no tokenizer and no hashes.

{"text": "You are a helpful assistant. ...", "servers": ["http://127.0.0.1:8001"]}
{"token_ids": [1, 319, 13563, 1546]}
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import nearest

FIELDS = ("text", "token_ids", "servers")
MAX_TOKEN_ID = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class GivenPrefix:
    """One line of the file: a text or token ids, and the servers that are to cache it, if they are given.

    where: the file and the line, for messages.
    """

    where: str
    text: str | None
    token_ids: tuple[int, ...]
    servers: tuple[str, ...] = ()


def read_prefix_file(path: str | Path) -> list[GivenPrefix]:
    """Returns the prefixes of a file, in its order. Empty lines are skipped.

    Raises:
      ConfigError: the file cannot be read or has no prefix, or a line is invalid, with its number.
    """
    try:
        lines = Path(path).read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"cannot read prefix file {path}: {reason}") from None
    found = [_read(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"prefix file {path} has no prefix")
    return found


def _read(line: str, where: str) -> GivenPrefix:
    try:
        read = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {getattr(error, 'msg', error)}") from None
    if not isinstance(read, dict):
        raise ConfigError(f'{where}: {line.strip():.40} is no object, such as {{"text": "..."}}')
    for name in read:
        if name not in FIELDS:
            close = nearest(name, FIELDS)
            hint = f"; the nearest is {close!r}" if close else f"; fields are {', '.join(FIELDS)}"
            raise ConfigError(f"{where}: there is no field {name!r:.40}{hint}")
    if ("text" in read) == ("token_ids" in read):
        raise ConfigError(f"{where}: give either text or token_ids")
    text, ids, servers = read.get("text"), read.get("token_ids", []), read.get("servers", [])
    if "text" in read and not (isinstance(text, str) and text):
        raise ConfigError(f"{where}: text is {text!r:.40}, must be a string that is not empty")
    if "token_ids" in read and not (isinstance(ids, list) and ids and all(map(_is_token_id, ids))):
        raise ConfigError(f"{where}: token_ids is {ids!r:.40}, must be a list of integers from 0")
    if not (isinstance(servers, list) and all(isinstance(server, str) for server in servers)):
        raise ConfigError(f"{where}: servers is {servers!r:.40}, must be a list of addresses")
    return GivenPrefix(where, text, tuple(ids), tuple(servers))


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID
