"""Files of saved sessions: blocks in a safetensors file, and session.json, which names it. Knows no engine.

session.json is replaced last, so that a folder holds the old session or the new one. Both files are checked by SHA-256
before anything of them is used; this detects accidents, not attacks.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from ksana_jax.core.checks import are_integers
from ksana_jax.core.errors import system_reason
from ksana_jax.core.files import open_to_read, read_bytes, remove_leftovers, replacing, write_atomic
from ksana_jax.kv.layout import BITS, KVLayout
from ksana_jax.loading.tensor_files import write_tensors

VERSION = 1
FACTS = "session.json"
_BLOCKS = "blocks-*.safetensors"
_LEAF, _STATE = "block.", "state."
_ARRAYS = ("places", "starts", "groups", "num_evicted")


class SessionError(ValueError):
    """A session cannot be saved or restored; the message is one line with the reason."""


class SessionPart(NamedTuple):
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
    first. blocks: [M, block_bytes] uint8. states: of recurrent layers after all tokens, [1, slot_bytes], or [0, ...].
    """

    token_ids: np.ndarray
    num_context: int
    salt: str
    parts: list[SessionPart]
    blocks: np.ndarray
    states: np.ndarray


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
    for prefix, part, data in ((_LEAF, layout, session.blocks), (_STATE, layout.of_states, session.states)):
        for leaf, values in zip(part.leaves, part.split(data).values(), strict=True) if part else ():
            tensors[prefix + leaf.name] = np.ascontiguousarray(values).view(BITS.get(leaf.dtype, leaf.dtype))
    blocks = folder / _BLOCKS.replace("*", secrets.token_hex(8))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the files have the tokens of prompts
        remove_leftovers(folder, _BLOCKS)
        with replacing(blocks) as file:
            os.fchmod(file.fileno(), 0o600)
            write_tensors(file, tensors)
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
    if not _has_types(facts):
        raise SessionError(f"{path} is damaged: it is not the JSON of a session")
    for name, here in made_with.items():
        if (there := facts["made_with"].get(name)) != here:
            raise SessionError(f"{folder} was saved with {name} {there!s:.200}, this engine has {here:.200}")
    tensors = _read_blocks(folder, **facts["blocks"])
    try:
        return _session(facts, tensors, layout)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise SessionError(f"{folder / facts['blocks']['file']} is damaged: {reason}") from None


def _has_types(facts: Mapping[str, Any]) -> bool:
    """True if all facts of a session are there, and the file that they name is one of the same folder."""
    kinds = {"made_with": dict, "cache_salt": str, "num_context": int, "parts": list, "blocks": dict}
    if not all(type(facts.get(name)) is kind for name, kind in kinds.items()):
        return False
    of_file = {name: type(value) for name, value in facts["blocks"].items()}
    if of_file != {"file": str, "bytes": int, "sha256": str} or not are_integers(facts["parts"], 1, 2**31):
        return False
    return fnmatch.fnmatchcase(name := facts["blocks"]["file"], _BLOCKS) and name.isprintable() and "/" not in name


def _session(facts: Mapping[str, Any], tensors: Mapping[str, np.ndarray], layout: KVLayout) -> Session:
    """Returns the session of files, after checking each number that indexes or allocates.

    Raises:
      KeyError, ValueError: a tensor is missing, or its values cannot be a session's.
    """
    token_ids = _integers("token_ids", tensors, 0, 2**31 - 1)
    blocks = _bytes_of(layout, _LEAF, tensors)
    states = np.empty((0, 0), np.uint8) if layout.of_states is None else _bytes_of(layout.of_states, _STATE, tensors)
    if len(states) != (layout.states is not None):
        raise ValueError(f"it has {len(states)} states")
    count, num_tokens, parts = len(blocks), len(token_ids), []
    for number, tokens in enumerate(facts["parts"]):
        places = _integers(f"{number}.places", tensors, 0, count - 1)
        starts = _integers(f"{number}.starts", tensors, 0, min(tokens, num_tokens) - 1)
        groups = _integers(f"{number}.groups", tensors, 0, len(layout.groups) - 1)
        evicted = _integers(f"{number}.num_evicted", tensors, 0, tokens)
        if len(evicted):
            sound = len(evicted) == len(layout.groups) and layout.eviction is not None
        else:  # full blocks of the prefix index, which come last
            sound = tokens % layout.block_size == 0 and number == len(facts["parts"]) - 1
        distinct = set(places.tolist()), set(zip(starts.tolist(), groups.tolist(), strict=False))
        if not sound or tokens > num_tokens:
            raise ValueError(f"part {number} has {tokens:,} tokens, {len(evicted)} numbers of evicted ones")
        if len({*map(len, (places, starts, groups, *distinct))}) > 1 or (starts % layout.block_size).any():
            raise ValueError(f"part {number} has blocks of which not each has its own place in the text")
        parts.append(SessionPart(tokens, places, starts, groups, evicted))
    return Session(token_ids, facts["num_context"], facts["cache_salt"], parts, blocks, states)


def _bytes_of(layout: KVLayout, prefix: str, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns blocks [n, block_bytes] from a file's tensors of their leaves."""
    count = len(tensors[prefix + layout.leaves[0].name])
    for leaf in layout.leaves:
        found, dtype = tensors[prefix + leaf.name], BITS.get(leaf.dtype, leaf.dtype)
        if found.shape != (count, *leaf.shape) or found.dtype.name != dtype:
            raise ValueError(f"{leaf.name} is {found.dtype}{list(found.shape)}, the layout has {leaf} for each block")
    blocks = np.empty((count, layout.block_bytes), np.uint8)
    for leaf, values in zip(layout.leaves, layout.split(blocks).values(), strict=True):
        values[:] = tensors[prefix + leaf.name].view(leaf.dtype)
    return blocks


def _integers(name: str, tensors: Mapping[str, np.ndarray], low: int, high: int) -> np.ndarray:
    values = tensors[name]
    sound = values.ndim == 1 and values.dtype == np.int32
    if not sound or (len(values) and not low <= values.min() <= values.max() <= high):
        raise ValueError(f"{name} is {values.dtype}{list(values.shape)}, must be int32 from {low:,} to {high:,}")
    return values


def remove_unfinished(folder: Path) -> None:
    """Removes what killed saves have left in the folder of several sessions."""
    for session in folder.glob("*/"):
        remove_leftovers(session, _BLOCKS)


def _read_blocks(folder: Path, file: str, bytes: int, sha256: str) -> dict[str, Any]:
    path = folder / file
    try:
        if (size := path.stat().st_size) != bytes:
            raise SessionError(f"{path} is damaged: it has {size:,} of {bytes:,} bytes")
        if _digest(path) != sha256:
            raise SessionError(f"{path} is damaged: its checksum is wrong")
        return safetensors.numpy.load_file(path)
    except (OSError, SafetensorError, KeyError, TypeError) as error:  # also of a type that NumPy lacks
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
