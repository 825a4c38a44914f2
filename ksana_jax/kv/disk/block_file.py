"""Reads and writes one KV block per file, with checks. Knows files and arrays; no tiers, no jax.

    8 bytes   magic
    4         version
    4         length of the header
    8         length of the payload
    16        BLAKE2b of all of the above, the header and the payload
    header    JSON: model, leaves, codec, key, parent, tokens, start; bytes in hex
    payload   the leaves as stored in memory, one after the other

A file is written under a temporary name and then renamed, so a file under its final name is complete as long as the
machine stays up. It is not synced: after a power failure, its content is undefined, which the checksum detects. Every
read is checked: a file is either exactly what an equal engine wrote for this key, or it is not used. The checksum
detects accidents, not attacks: anyone who can write to the folder can write blocks that pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ksana_jax.core.files import create, open_to_read
from ksana_jax.kv.disk.failpoints import failpoint
from ksana_jax.kv.layout import KVLayout, Leaf

MAGIC = b"KSANA KV"
VERSION = 2
MAX_HEADER_BYTES = 2**20
_CHECKED = struct.Struct("<8sIIQ")
_DIGEST_BYTES = 16
PREFIX_BYTES = _CHECKED.size + _DIGEST_BYTES


class BadBlockFile(ValueError):
    """A file is not a complete block of the expected kind; the message is one line with the reason."""


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """Properties shared by all blocks of one cache.

    Args:
      model_fingerprint: digest of everything that determines keys and values; see `engine.fingerprint`.
      leaves: the arrays of a block. codec: how keys and values are encoded in them; see `KVLayout`.
    """

    model_fingerprint: str
    leaves: tuple[Leaf, ...]
    codec: str = "f32"

    @classmethod
    def of(cls, layout: KVLayout, model_fingerprint: str) -> BlockFormat:
        """Returns the format of a layout's blocks."""
        return cls(model_fingerprint, layout.leaves, layout.codec)

    @property
    def nbytes(self) -> int:
        """Size of a block in bytes."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digits that differ between formats."""
        return hashlib.sha256(json.dumps(dataclasses.astuple(self)).encode()).hexdigest()[:32]


@dataclasses.dataclass(frozen=True)
class BlockFacts:
    """Describes the content of one block.

    Args:
      key, parent: SHA-256 digests (32 bytes) of the text through this block, and of the text before it; see
        `kv.prefix_index`.
      tokens: int32 bytes. start: sequence position of the first.
    """

    key: bytes
    parent: bytes
    tokens: bytes
    start: int


def write_block(path: Path, temporary: Path, format: BlockFormat, facts: BlockFacts, data: np.ndarray) -> None:
    """Writes a block's file completely or not at all.

    Args:
      temporary: an unused name in the same folder; no file of this name remains afterwards.
      data: a block's bytes, in a contiguous array of any shape.

    Raises:
      OSError: the write failed; neither path nor temporary is left behind, if possible. FileExistsError: temporary
        already exists, and is left alone.
    """
    header = encode_header(format, facts)
    payload = data.reshape(-1).view(np.uint8).data
    checked = _CHECKED.pack(MAGIC, VERSION, len(header), len(payload))
    failpoint("disk.before_write")
    file = create(temporary, 0o600)  # the header has the tokens of prompts
    try:
        with file:
            file.write(checked)
            file.write(_checksum(checked, header, payload))
            file.write(header)
            half = len(payload) // 2
            file.write(payload[:half])
            file.flush()
            failpoint("disk.half_written")
            file.write(payload[half:])
        failpoint("disk.before_rename")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    failpoint("disk.after_rename")


def read_block(path: Path, format: BlockFormat, expected: BlockFacts, out: np.ndarray) -> bool:
    """Reads a block's file if it holds the expected block.

    Args:
      out: an array of a block's bytes, written only if all checks pass.

    Returns:
      True if it was read. False for an intact file of another text with the same key.

    Raises:
      BadBlockFile: the file is not an intact block of this format with this key.
      OSError: it cannot be read.
    """
    failpoint("disk.before_read")
    with open_to_read(path) as file:
        checked, checksum, header_bytes = _read_prefix(file, format)
        header = file.read(header_bytes)
        payload = np.empty(format.nbytes, np.uint8)
        num_read = len(header) + file.readinto(payload.data)
    if num_read != header_bytes + format.nbytes:
        raise BadBlockFile(f"it ended after {num_read:,} of {header_bytes + format.nbytes:,} bytes")
    if _checksum(checked, header, payload.data) != checksum:
        raise BadBlockFile("its checksum is wrong")
    facts = _decode_header(header, format)
    if facts.key != expected.key:
        raise BadBlockFile(f"it holds block {facts.key.hex()}")
    if facts != expected:
        return False
    np.copyto(out, payload.view(out.dtype).reshape(out.shape))
    return True


def read_facts(path: Path, format: BlockFormat) -> BlockFacts:
    """Reads only the header of a block's file; the payload may still be damaged.

    Raises:
      BadBlockFile: see `read_block`.
      OSError: it cannot be read.
    """
    with open_to_read(path, buffering=4096) as file:
        _, _, header_bytes = _read_prefix(file, format)
        return _decode_header(file.read(header_bytes), format)


def encode_header(format: BlockFormat, facts: BlockFacts) -> bytes:
    return json.dumps(
        {
            "model": format.model_fingerprint,
            "leaves": format.leaves,
            "codec": format.codec,
            "key": facts.key.hex(),
            "parent": facts.parent.hex(),
            "tokens": facts.tokens.hex(),
            "start": facts.start,
        }
    ).encode()


def file_bytes(format: BlockFormat, facts: BlockFacts) -> int:
    """Returns the size of a block's file in bytes."""
    return PREFIX_BYTES + len(encode_header(format, facts)) + format.nbytes


def _checksum(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _read_prefix(file: BinaryIO, format: BlockFormat) -> tuple[bytes, bytes, int]:
    """Returns the checked part of a file's prefix, its checksum, and the header's length, all within bounds."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES:
        raise BadBlockFile(f"it has only {len(prefix)} bytes")
    checked, checksum = prefix[: _CHECKED.size], prefix[_CHECKED.size :]
    magic, version, header_bytes, payload_bytes = _CHECKED.unpack(checked)
    if magic != MAGIC:
        raise BadBlockFile("it does not begin as a block does")
    if version != VERSION:
        raise BadBlockFile(f"it is of version {version}, this is {VERSION}")
    if payload_bytes != format.nbytes:
        raise BadBlockFile(f"its block has {payload_bytes:,} bytes, must be {format.nbytes:,}")
    if header_bytes > MAX_HEADER_BYTES:
        raise BadBlockFile(f"its header has {header_bytes:,} bytes; supported: at most {MAX_HEADER_BYTES:,}")
    if size != PREFIX_BYTES + header_bytes + payload_bytes:
        raise BadBlockFile(f"it has {size:,} bytes of {PREFIX_BYTES + header_bytes + payload_bytes:,}")
    return checked, checksum, header_bytes


def _decode_header(header: bytes, format: BlockFormat) -> BlockFacts:
    try:
        values = json.loads(header)
        leaves = tuple(Leaf(name, tuple(shape), dtype) for name, shape, dtype in values["leaves"])
        found = BlockFormat(values["model"], leaves, values["codec"])
        key, parent, tokens = (bytes.fromhex(values[name]) for name in ("key", "parent", "tokens"))
        facts = BlockFacts(key, parent, tokens, values["start"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadBlockFile("its header cannot be understood") from None
    if found.leaves != format.leaves:
        there, wanted = (", ".join(map(str, f.leaves)) for f in (found, format))
        raise BadBlockFile(f"its block is {there:.100}, must be {wanted:.100}")
    for name in ("model_fingerprint", "codec"):
        there, wanted = getattr(found, name), getattr(format, name)
        if there != wanted:
            raise BadBlockFile(f"its {name} is {there!r:.100}, must be {wanted!r:.100}")
    if type(facts.start) is not int:
        raise BadBlockFile("its header cannot be understood")
    return facts
