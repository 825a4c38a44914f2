"""Files of saved sessions: blocks in a safetensors file, and session.json, which names it. Knows no engine.

session.json is replaced last, so that a folder holds the old session or the new one. Both files are checked by SHA-256
before anything of them is used; this detects accidents, not attacks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from ksana_jax.core.errors import system_reason
from ksana_jax.core.files import open_to_read, read_bytes, replacing, write_atomic
from ksana_jax.kv.layout import BITS, KVLayout

VERSION = 1
FACTS = "session.json"
_BLOCKS = "blocks-*.safetensors"
_LEAF = "block."
_ARRAYS = ("places", "starts", "groups", "num_evicted")


class SessionError(ValueError):
    """A session cannot be saved or restored; the message is one line with the reason."""


class Part(NamedTuple):
    """The cached state after the first num_tokens tokens of a text: m of a session's blocks, in Gk groups of layers.

    places, starts, groups: [m] int32, indices of the blocks, the cache positions where they begin, and their groups.
    num_evicted: [Gk] int32, tokens that each group has evicted; empty for full blocks of the prefix index.
    """

    num_tokens: int
    places: np.ndarray
    starts: np.ndarray
    groups: np.ndarray
    num_evicted: np.ndarray


class Session(NamedTuple):
    """The cached states of a text.

    token_ids: [n] int32. num_context: prompt tokens before the question. salt: of the prefix cache. parts: the longest
    first. blocks: [M, block_bytes] uint8.
    """

    token_ids: np.ndarray
    num_context: int
    salt: str
    parts: list[Part]
    blocks: np.ndarray


def write_session(folder: Path, session: Session, layout: KVLayout, made_with: Mapping[str, str]) -> None:
    """Writes a session to a folder; it replaces an earlier one.

    Args:
      layout: of the blocks. made_with: settings on which the state depends, by name.

    Raises:
      SessionError: a file cannot be written; the earlier session is still complete.
    """
    tensors = {"token_ids": session.token_ids}
    for number, part in enumerate(session.parts):
        tensors |= {f"{number}.{name}": getattr(part, name) for name in _ARRAYS}
    for leaf, values in zip(layout.leaves, layout.split(session.blocks).values(), strict=True):
        tensors[_LEAF + leaf.name] = np.ascontiguousarray(values).view(BITS.get(leaf.dtype, leaf.dtype))
    blocks = folder / _BLOCKS.replace("*", secrets.token_hex(8))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the files have the tokens of prompts
        with replacing(blocks) as file:
            safetensors.numpy.save_file(tensors, file.name)
        facts = {
            "version": VERSION,
            "made_with": dict(made_with),
            "cache_salt": session.salt,
            "num_context": session.num_context,
            "parts": [part.num_tokens for part in session.parts],
            "blocks": {"file": blocks.name, "bytes": blocks.stat().st_size, "sha256": _digest(blocks)},
        }
        write_atomic(folder / FACTS, json.dumps({**facts, "sha256": _checksum(facts)}, indent=1) + "\n")
    except (OSError, SafetensorError) as error:
        _remove([blocks])
        raise SessionError(f"the session cannot be saved in {folder}: {_reason(error)}") from None
    _remove(old for old in folder.glob(_BLOCKS) if old != blocks)


def read_session(folder: Path, layout: KVLayout, made_with: Mapping[str, str]) -> Session:
    """Reads a session.

    Args:
      layout, made_with: of the engine that will continue it.

    Raises:
      SessionError: a file is missing or damaged, or the session was saved with other settings.
    """
    path = folder / FACTS
    try:
        facts = json.loads(read_bytes(path))
        checksum = facts.pop("sha256")
    except OSError as error:
        raise SessionError(f"{path} cannot be read: {_reason(error)}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise SessionError(f"{path} is damaged: it is not the JSON of a session") from None
    if facts.get("version") != VERSION:
        raise SessionError(f"{path} is of version {facts.get('version')!r:.20}, this is {VERSION}")
    if _checksum(facts) != checksum:
        raise SessionError(f"{path} is damaged: its checksum is wrong")
    for name, here in made_with.items():
        if (there := facts["made_with"].get(name)) != here:
            raise SessionError(f"{folder} was saved with {name} {there!s:.200}, this engine has {here:.200}")
    tensors = _read_blocks(folder, **facts["blocks"])
    blocks = np.empty((len(tensors[_LEAF + layout.leaves[0].name]), layout.block_bytes), np.uint8)
    for leaf, values in zip(layout.leaves, layout.split(blocks).values(), strict=True):
        values[:] = tensors[_LEAF + leaf.name].view(leaf.dtype)
    parts = [
        Part(count, *(tensors[f"{number}.{name}"] for name in _ARRAYS)) for number, count in enumerate(facts["parts"])
    ]
    return Session(tensors["token_ids"], facts["num_context"], facts["cache_salt"], parts, blocks)


def _read_blocks(folder: Path, file: str, bytes: int, sha256: str) -> dict[str, Any]:
    path = folder / file
    try:
        if (size := path.stat().st_size) != bytes:
            raise SessionError(f"{path} is damaged: it has {size:,} of {bytes:,} bytes")
        if _digest(path) != sha256:
            raise SessionError(f"{path} is damaged: its checksum is wrong")
        return safetensors.numpy.load_file(path)
    except (OSError, SafetensorError) as error:
        raise SessionError(f"{path} cannot be read: {_reason(error)}") from None


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def _digest(path: Path) -> str:
    with open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _reason(error: Exception) -> str:
    return system_reason(error) if isinstance(error, OSError) else str(error)
