"""The disk tier answers every damage and every error of the disk with a miss."""

import contextlib
import dataclasses
import errno
import os
import shutil
import warnings

import pytest

from ksana_jax.kv.disk import failpoints
from ksana_jax.kv.disk.block_file import BlockFormat
from ksana_jax.kv.disk.tier import DiskTier
from ksana_jax.kv.layout import Leaf
from tests.kv.disk.blocks import FORMAT, Later, blank, chain
from tests.kv.disk.tiers import FILE, PLENTY, assert_books, files, flip, read, write

DAMAGES = {
    **{f"cut at {n}/7": lambda content, n=n: content[: len(content) * n // 7] for n in range(1, 7)},
    "empty": lambda content: b"",
    "pickle": lambda content: b"\x80\x04\x95" + content,
    "magic": flip(0),
    "length": flip(13),
    "checksum": flip(30),
    "header": flip(60),
    "payload": flip(-100),
    "last byte": flip(-1),
    "longer": lambda content: content + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_damaged_file_is_a_miss_with_a_warning_and_goes(open_tier, damage, restarted):
    tier = open_tier()
    good, bad = chain(2)
    write(tier, good, bad)
    path = tier._path(bad.key)
    content = path.read_bytes()
    path.write_bytes(DAMAGES[damage](content))
    assert path.read_bytes() != content
    if restarted:
        tier.close()
        tier = open_tier()
    assert not read(tier, bad)
    assert not path.exists() and bad.key not in tier and not read(tier, bad)
    (message,) = open_tier.told
    assert message.startswith(f"{path} is not a block of this cache and was removed: it")
    assert tier.counters.misses_corrupt == 1 and tier.enabled and read(tier, good)
    write(tier, bad)
    assert read(tier, bad)
    assert_books(tier)


def test_the_default_warning_is_seen_once_and_never_raised_in_the_worker(tmp_path):
    with contextlib.closing(DiskTier(tmp_path, FORMAT, PLENTY)) as tier:
        for facts in chain(2):
            write(tier, facts)
            tier.flush()
            tier._path(facts.key).write_bytes(b"damaged")
        with pytest.warns(UserWarning, match="it has only 7 bytes"):
            assert not read(tier, chain(1)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not read(tier, chain(2)[1])
        assert tier.enabled and tier.counters.misses_corrupt == 2


def test_blocks_of_other_kinds_under_our_names_are_removed(open_tier):
    tier = open_tier()
    facts, other = chain(2)
    write(tier, facts)
    write(tier, other)
    shutil.copy(tier._path(facts.key), tier._path(other.key))
    assert not read(tier, other) and "it holds block" in open_tier.told[-1]
    for change, message in (
        ({"model_fingerprint": "b"}, "its model_fingerprint is 'b', must be 'a model'"),
        ({"leaves": (Leaf("kv", (2, 2, 4, 3), "float32"),)}, "its block is kv float32[2, 2, 4, 3]"),
        ({"leaves": (Leaf("kv", (2, 2, 3, 4), "int32"),)}, "its block is kv int32[2, 2, 3, 4]"),
        ({"codec": "int4"}, "its codec is 'int4'"),
    ):
        foreign = open_tier(dataclasses.replace(FORMAT, **change))
        write(foreign, other)
        write(tier, other)
        shutil.copy(foreign._path(other.key), tier._path(other.key))
        assert not read(tier, other) and message in open_tier.told[-1]
        assert not tier._path(other.key).exists() and foreign._path(other.key).exists()
    assert len(open_tier.told) == 5 and read(tier, facts)


def test_damaged_headers_do_not_stop_replacement(open_tier):
    text = chain(4)
    with contextlib.closing(open_tier()) as tier:
        write(tier, *text)
        tier._path(text[3].key).write_bytes(b"damaged, and of another size" * 100)
    tier = open_tier(budget=3 * FILE + 10)
    assert [b.key in tier for b in text] == [True, True, True, False] and len(open_tier.told) == 1
    assert_books(tier)


def test_a_file_that_somebody_else_removed_is_a_miss(open_tier):
    tier = open_tier()
    a, b = chain(2)
    write(tier, a, b)
    tier._path(b.key).unlink()
    assert not read(tier, b) and b.key not in tier
    assert tier.enabled and read(tier, a) and "it has gone" in open_tier.told[0]
    assert_books(tier)


def io_error():
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def a_busy_day(tier) -> list[bool]:
    """Writes, reads, replacements, a read; each answer is checked to be right or a miss."""
    found = []
    for name in "abcd":
        text = chain(3, name)
        write(tier, *text)
        found += [read(tier, facts) for facts in text]
    return [*found, read(tier, chain(1, "c")[0])]


@pytest.mark.parametrize("point", failpoints.POINTS)
@pytest.mark.parametrize("action", ["oserror", io_error])
def test_an_error_at_any_call_turns_the_tier_off_with_one_warning(open_tier, tmp_path, point, action):
    for nth in range(1, 100):
        armed = failpoints.arm(point, action, nth)
        tier = open_tier(budget=8 * FILE, folder=tmp_path / str(nth))
        found = a_busy_day(tier)
        if armed.calls_left:
            break
        assert not tier.enabled and not tier.keys() and tier.num_bytes == 0
        (message,) = open_tier.told
        assert message.startswith(
            f"the disk cache in {tier.folder} is off, requests continue without it: OSError: [Errno "
        )
        assert not all(found) and not read(tier, chain(1)[0]) and tier.counters.errors == 1
        assert not list(tier.folder.glob("*.tmp"))
        open_tier.told.clear()
        tier.close()
        failpoints.disarm()
        with contextlib.closing(open_tier(budget=8 * FILE, folder=tmp_path / str(nth))) as tier:
            a_busy_day(tier)  # the next start goes on from what is there
            assert tier.enabled and not open_tier.told
    assert nth > 2 and tier.enabled and all(found) and not open_tier.told


def test_tasks_that_wait_when_the_tier_turns_off_are_misses(open_tier):
    worker = Later()
    tier = open_tier(executor=worker)
    blocks = chain(5)
    write(tier, blocks.pop())
    worker.run()
    there = files(tier)
    write(tier, *blocks)
    futures = [tier.read(b.key, b, blank()) for b in blocks]
    failpoints.arm("disk.half_written", "oserror", nth=1)
    worker.run()
    assert [f.result() for f in futures] == [False] * 4 and len(open_tier.told) == 1
    assert files(tier) == there
    write(tier, *blocks)
    assert not worker.tasks and not tier.read(blocks[0].key, blocks[0], blank()).result()


def test_a_folder_that_is_removed_turns_the_tier_off(open_tier):
    for use in (write, read):
        tier = open_tier()
        a, b = chain(2)
        write(tier, a)
        shutil.rmtree(tier.folder)
        use(tier, a if use is read else b)
        assert not tier.enabled and len(open_tier.told) == 1 and "No such file or directory" in open_tier.told.pop()
        tier.close()


def test_a_folder_that_cannot_be_used_turns_the_tier_off_at_the_start(open_tier, tmp_path):
    (tmp_path / "file").write_text("in the way")
    tier = open_tier(folder=tmp_path / "file" / "cache")
    write(tier, *chain(2))
    assert not tier.enabled and not read(tier, chain(1)[0])
    assert len(open_tier.told) == 1 and "Not a directory" in open_tier.told[0]


def test_a_full_disk_is_a_full_disk(open_tier):
    """The kernel's own error: a limit on file size simulates a full disk."""
    import resource
    import signal

    large = BlockFormat("a model", (Leaf("kv", (64, 1024), "float32"),))
    tier = open_tier(large, executor=None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        write(tier, *chain(3))
        tier.flush()
        assert not read(tier, chain(1)[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not tier.enabled and len(open_tier.told) == 1 and "File too large" in open_tier.told[0]
    assert not files(tier)
