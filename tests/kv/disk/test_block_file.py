"""A block's file gives back exactly what was written, or says why not."""

import dataclasses
import errno
import json
import pickle
import struct

import numpy as np
import pytest

from ksana_jax.kv.disk import block_file, failpoints
from ksana_jax.kv.disk.block_file import BadBlockFile, BlockFacts, BlockFormat, read_block, read_facts, write_block
from ksana_jax.kv.layout import Leaf
from tests.kv.disk.blocks import BF16, FORMAT, QUANTISED, blank, chain, data_of

FACTS, OTHER = chain(2)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "block.kv"


def write(path, format=FORMAT, facts=FACTS, data=None):
    write_block(path, path.with_suffix(".tmp"), format, facts, data_of(facts, format) if data is None else data)


def assert_bad(path, match, format=FORMAT, facts=FACTS):
    out = blank(format)
    with pytest.raises(BadBlockFile, match=match):
        read_block(path, format, facts, out)
    assert out.tobytes() == blank(format).tobytes()


@pytest.mark.parametrize("format", [FORMAT, BF16, QUANTISED, BlockFormat("", (Leaf("kv", (0, 3), "float32"),))])
def test_a_block_comes_back_bit_by_bit(path, format):
    write(path, format)
    out = blank(format)
    assert read_block(path, format, FACTS, out)
    assert out.tobytes() == data_of(FACTS, format).tobytes()
    assert read_facts(path, format) == FACTS
    assert path.stat().st_size == block_file.file_bytes(format, FACTS)
    assert [p.name for p in path.parent.iterdir()] == ["block.kv"]


def test_a_block_is_read_into_a_row_of_a_larger_array(path):
    write(path)
    rows = np.zeros((3, 2, 2, 3, 4), np.float32)
    assert read_block(path, FORMAT, FACTS, rows[1])
    assert rows[1].tobytes() == data_of(FACTS).tobytes() and not rows[0].any() and not rows[2].any()


def test_every_truncated_file_is_refused(path):
    write(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert_bad(path, "bytes")
        if length % 50 == 0:
            with pytest.raises(BadBlockFile):
                read_facts(path, FORMAT)
    path.write_bytes(whole + b"\0")
    assert_bad(path, "bytes of")


def test_every_flipped_bit_is_refused(path):
    write(path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        assert_bad(path, "it")
    path.write_bytes(whole)
    assert read_block(path, FORMAT, FACTS, blank())


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 1000, pickle.dumps({"key": b"x" * 500}), b'{"json": 1}' * 90, np.random.default_rng(0).bytes(4096)],
    ids=["empty", "zeros", "pickle", "json", "noise"],
)
def test_files_of_another_kind_are_refused(path, content):
    path.write_bytes(content)
    assert_bad(path, "it has only 0 bytes" if not content else "does not begin as a block does")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_fingerprint", "another", "its model_fingerprint is 'another', must be 'a model'"),
        (
            "leaves",
            (Leaf("kv", (4, 3, 2, 2), "float32"),),
            r"its block is kv float32\[4, 3, 2, 2\], must be kv float32\[2, 2, 3, 4\]",
        ),
        ("leaves", (Leaf("kv", (2, 2), "float32"),), "its block has 16 bytes, must be 192"),
        ("leaves", (Leaf("kv", (2, 2, 3, 4), "int32"),), "its block is kv int32"),
        ("leaves", (Leaf("scores", (2, 2, 3, 4), "float32"),), "its block is scores float32"),
        ("leaves", BF16.leaves, "its block has 96 bytes, must be 192"),
        ("codec", "int4", "its codec is 'int4', must be 'f32'"),
    ],
)
def test_blocks_of_another_format_are_refused(path, field, value, message):
    write(path, dataclasses.replace(FORMAT, **{field: value}))
    assert_bad(path, message)


def test_another_block_under_this_name_is_refused(path):
    write(path, facts=OTHER)
    assert_bad(path, f"it holds block {OTHER.key.hex()}")


@pytest.mark.parametrize(
    "other", [{"tokens": b"\1" * 16}, {"parent": b"\1" * 32}, {"start": 400}, {"tokens": FACTS.tokens + b"\0\0\0\0"}]
)
def test_another_text_of_the_same_key_is_a_miss(path, other):
    write(path)
    out = blank()
    assert not read_block(path, FORMAT, dataclasses.replace(FACTS, **other), out)
    assert out.tobytes() == blank().tobytes()


def written_by_hand(header: bytes, version=block_file.VERSION, header_bytes=None) -> bytes:
    """A file with a right checksum around any header."""
    payload = data_of(FACTS).tobytes()
    checked = struct.pack(
        "<8sIIQ", block_file.MAGIC, version, len(header) if header_bytes is None else header_bytes, len(payload)
    )
    return checked + block_file._checksum(checked, header, payload) + header + payload


GOOD = json.loads(block_file.encode_header(FORMAT, FACTS))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b"1" * 10_000,
        json.dumps({**GOOD, "key": "no hex"}).encode(),
        json.dumps({**GOOD, "tokens": 7}).encode(),
        json.dumps({**GOOD, "leaves": 7}).encode(),
        json.dumps({**GOOD, "leaves": [["kv", 7, "float32"]]}).encode(),
        json.dumps({**GOOD, "start": True}).encode(),
        json.dumps({**GOOD, "start": "0"}).encode(),
        json.dumps({**GOOD, "start": 1e300}).encode(),
    ],
    ids=range(14),
)
def test_strange_headers_with_a_right_checksum_are_refused(path, header):
    path.write_bytes(written_by_hand(header))
    assert_bad(path, "its header cannot be understood")
    with pytest.raises(BadBlockFile, match="its header cannot be understood"):
        read_facts(path, FORMAT)


def test_lengths_and_versions_are_checked_before_anything_is_read(path):
    good = json.dumps(GOOD).encode()
    path.write_bytes(written_by_hand(good))
    assert read_block(path, FORMAT, FACTS, blank())  # the file made by hand is right in all but what follows
    path.write_bytes(written_by_hand(good, version=1))
    assert_bad(path, "it is of version 1, this is 2")
    path.write_bytes(written_by_hand(good, header_bytes=2**32 - 1))
    assert_bad(path, "its header has 4,294,967,295 bytes; supported: at most 1,048,576")
    path.write_bytes(written_by_hand(good, header_bytes=0))
    assert_bad(path, "bytes of")


def test_long_tokens_and_deep_positions_fit(path):
    facts = BlockFacts(b"k" * 32, b"p" * 32, np.arange(8192, dtype=np.int32).tobytes(), 2**31)
    write(path, facts=facts)
    assert read_block(path, FORMAT, facts, blank()) and read_facts(path, FORMAT) == facts


@pytest.mark.parametrize("point", ["disk.before_write", "disk.half_written", "disk.before_rename"])
def test_a_write_that_fails_leaves_nothing_behind(path, point):
    failpoints.arm(point, "oserror")
    with pytest.raises(OSError) as error:
        write(path)
    assert error.value.errno == errno.ENOSPC
    assert not list(path.parent.iterdir())


def test_formats_that_differ_have_other_fingerprints():
    others = [
        dataclasses.replace(FORMAT, **change)
        for change in (
            {"model_fingerprint": "b"},
            {"leaves": (Leaf("kv", (4, 3, 2, 2), "float32"),)},
            {"leaves": (Leaf("kv", (2, 2, 3, 4), "int32"),)},
            {"leaves": (Leaf("k", (2, 2, 3, 4), "float32"),)},
            {"codec": "int4"},
        )
    ]
    assert len({f.fingerprint for f in [FORMAT, *others]}) == 6
    assert FORMAT.fingerprint == BlockFormat("a model", (Leaf("kv", (2, 2, 3, 4), "float32"),)).fingerprint
    assert (FORMAT.nbytes, BF16.nbytes) == (192, 96)


def test_failpoints_are_checked_when_they_are_armed():
    with pytest.raises(ValueError, match=r"failpoint is 'disk\.never', must be one of disk\.before_write"):
        failpoints.arm("disk.never", "kill")
    with pytest.raises(
        ValueError, match=r"action of failpoint disk\.before_read is 'explode', must be one of kill, oserror"
    ):
        failpoints.arm("disk.before_read", "explode")
    with pytest.raises(ValueError, match=r"nth of failpoint disk\.before_read is 0, must be at least 1"):
        failpoints.arm_from("disk.before_read=kill:0")
    with pytest.raises(ValueError, match="must be name=action or name=action:nth"):
        failpoints.arm_from("disk.before_read=kill:x")


def test_a_failpoint_acts_once_at_the_call_it_was_armed_for():
    calls = []
    point = failpoints.arm("disk.before_read", lambda: calls.append(point.calls_left), nth=3)
    for _ in range(5):
        failpoints.failpoint("disk.before_read")
        failpoints.failpoint("disk.before_write")
    assert calls == [0]
