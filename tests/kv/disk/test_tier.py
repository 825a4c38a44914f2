"""The disk tier finds what it wrote, keeps to its budget, and answers every damage and every error with a miss."""

import concurrent.futures
import contextlib
import dataclasses
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana_jax.config import ConfigError
from ksana_jax.kv.disk import failpoints
from ksana_jax.kv.disk.block_file import BlockFormat, file_bytes
from ksana_jax.kv.disk.tier import DiskTier
from ksana_jax.kv.layout import Leaf
from tests.kv.disk.blocks import BF16, FORMAT, AtOnce, Later, blank, chain, data_of

FILE = file_bytes(FORMAT, chain(1)[0])  # of a block that starts at one digit
PLENTY = 2**20


@pytest.fixture(autouse=True)
def no_failpoints():
    yield
    failpoints.disarm()


@pytest.fixture
def open_tier(tmp_path):
    """Opens tiers on one folder, with a list for their warnings; closes what is left open."""
    told, tiers = [], []

    def make(format=FORMAT, budget=PLENTY, folder=tmp_path, **settings) -> DiskTier:
        settings = {"warn": told.append, "executor": AtOnce(), **settings}
        tiers.append(DiskTier(folder, format, budget, **settings))
        return tiers[-1]

    make.told = told
    yield make
    for tier in tiers:
        if isinstance(tier._executor, Later):
            tier._executor = AtOnce()
        tier.close()


def write(tier, *blocks, generation=0):
    for facts in blocks:
        tier.write(facts, data_of(facts, tier.format, generation))


def read(tier, facts, generation=0) -> bool:
    """Whether a block is found; if so it is the right one, and if not the array is as it was."""
    out = blank(tier.format)
    found = tier.read(facts.key, facts, out).result(timeout=10)
    assert out.tobytes() == (data_of(facts, tier.format, generation) if found else blank(tier.format)).tobytes()
    return found


def files(tier) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in tier.folder.iterdir() if p.name != "lock"}


def assert_books(tier):
    """The tier knows exactly the files there are."""
    there = files(tier)
    assert set(there) == {f"{key.hex()}.kv" for key in tier.keys()}
    assert tier.num_files == len(there) and tier.num_bytes == sum(there.values()) <= tier.budget_bytes


# ------------------------------------------------------------------ writing and reading


@pytest.mark.parametrize("format", [FORMAT, BF16])
def test_what_is_written_is_read_by_a_thread_of_its_own(open_tier, format):
    tier = open_tier(format, executor=None)
    blocks = chain(20)
    write(tier, *blocks)
    assert all(facts.key in tier for facts in blocks)
    assert all(read(tier, facts) for facts in blocks)
    assert not read(tier, chain(1, "other")[0])
    tier.flush()
    assert_books(tier)
    c = tier.counters
    assert (c.written, c.read, c.misses, c.dropped, c.errors) == (20, 20, 1, 0, 0)
    assert c.written_bytes == c.read_bytes == 20 * format.nbytes


def test_data_may_change_as_soon_as_write_returns(open_tier):
    worker = Later()
    tier = open_tier(executor=worker)
    (facts,) = chain(1)
    data = data_of(facts).copy()
    tier.write(facts, data)
    data[:] = 0
    future = tier.read(facts.key, facts, out := blank())
    assert facts.key in tier and not future.done()
    worker.run()
    assert future.result() and out.tobytes() == data_of(facts).tobytes()
    tier._executor = AtOnce()


def test_a_block_that_is_there_is_not_written_again(open_tier):
    tier = open_tier()
    (facts,) = chain(1)
    write(tier, facts)
    write(tier, facts, generation=1)
    assert read(tier, facts) and tier.counters.written == 1


def test_discarded_blocks_are_gone_and_can_be_written_again(open_tier):
    worker = Later()
    tier = open_tier(executor=worker)
    (facts,) = chain(1)
    write(tier, facts)
    tier.discard(facts.key)
    assert facts.key not in tier
    write(tier, facts, generation=1)  # while both are still waiting
    worker.run()
    assert (tier.counters.written, tier.counters.dropped, tier.num_files) == (1, 1, 1)
    tier._executor = AtOnce()
    assert read(tier, facts, generation=1)
    tier.discard(facts.key)
    tier.discard(b"never written")
    assert not files(tier) and not read(tier, facts)
    assert_books(tier)


def test_a_block_that_is_written_while_another_thread_discards_it_stays(open_tier):
    class Overtaken(AtOnce):
        """Another thread is faster than the next task."""

        other = None

        def submit(self, *args, **kwargs):
            other, self.other = self.other, None
            if other:
                other()
            return super().submit(*args, **kwargs)

    tier = open_tier(executor=Overtaken())
    (facts,) = chain(1)
    write(tier, facts)
    tier._executor.other = lambda: write(tier, facts)
    tier.discard(facts.key)
    assert read(tier, facts) and not open_tier.told
    assert_books(tier)


def test_facts_are_known_before_and_after_a_restart(open_tier):
    blocks = chain(2)
    with contextlib.closing(open_tier()) as tier:
        write(tier, *blocks)
        assert [tier.facts(b.key) for b in blocks] == blocks
    tier = open_tier()
    assert set(tier.keys()) == {b.key for b in blocks}
    assert [tier.facts(b.key) for b in blocks] == blocks and tier.facts(b"?") is None


def test_another_text_of_the_same_key_is_a_miss_and_stays(open_tier):
    tier = open_tier()
    facts, other = chain(2)
    write(tier, facts)
    assert not read(tier, dataclasses.replace(other, key=facts.key))
    assert read(tier, facts) and not open_tier.told


def test_writes_beyond_what_may_wait_are_dropped_and_counted(open_tier):
    worker = Later()
    tier = open_tier(executor=worker, max_pending_bytes=2 * FORMAT.nbytes)
    blocks = chain(4)
    write(tier, *blocks)
    assert [b.key in tier for b in blocks] == [True, True, False, False] and tier.counters.dropped == 2
    worker.run()
    write(tier, *blocks[2:])
    worker.run()
    tier._executor = AtOnce()
    assert all(read(tier, b) for b in blocks)


def test_a_block_larger_than_what_may_wait_is_written_alone(open_tier):
    tier = open_tier(max_pending_bytes=1)
    write(tier, *chain(3))
    assert tier.num_files == 3


def test_the_module_does_not_import_jax():
    subprocess.run(
        [sys.executable, "-c", "import ksana_jax.kv.disk.tier, sys; assert 'jax' not in sys.modules"], check=True
    )


# ------------------------------------------------------------------ restart


def test_a_restart_finds_what_is_there_and_removes_temporary_files(open_tier):
    blocks = chain(9)
    with contextlib.closing(open_tier(executor=None)) as tier:
        write(tier, *blocks)
        folder = tier.folder
    assert blocks[0].key not in tier and not tier.enabled and not read(tier, blocks[0])
    (folder / f"{blocks[0].key.hex()}.tmp").write_bytes(b"half")
    (folder / "README").write_text("not ours: stays")
    tier = open_tier(executor=None)
    assert all(read(tier, b) for b in blocks) and not open_tier.told
    (folder / "README").unlink()
    assert_books(tier)


def test_after_a_reset_the_books_say_what_is_in_the_folder(open_tier):
    tier, blocks = open_tier(), chain(4)
    write(tier, *blocks[:3])
    # An interrupt has left the books half written: a file is missing, another was never submitted, bytes are pending.
    tier._files.remove(tier._files.by_key[blocks[0].key])
    tier._files.add(blocks[3].key, blocks[3])
    tier._pending_bytes = 10**9
    tier.reset()
    assert_books(tier)
    assert all(read(tier, facts) for facts in blocks[:3]) and blocks[3].key not in tier
    write(tier, blocks[3])
    assert read(tier, blocks[3]) and not tier.counters.dropped


def test_a_reset_of_a_folder_that_has_gone_turns_the_tier_off(open_tier):
    tier = open_tier()
    write(tier, *chain(1))
    shutil.rmtree(tier.folder)
    tier.reset()
    assert not tier.enabled and len(open_tier.told) == 1


def test_other_formats_have_folders_of_their_own(open_tier, tmp_path):
    (facts,) = chain(1)
    tiers = [open_tier(format) for format in (FORMAT, BF16, dataclasses.replace(FORMAT, model_fingerprint="b"))]
    assert len({tier.folder for tier in tiers}) == 3 and all(tier.folder.parent == tmp_path for tier in tiers)
    write(tiers[0], facts)
    assert [read(tier, facts) for tier in tiers] == [True, False, False]
    assert facts.key not in tiers[1] and not open_tier.told


def test_a_folder_in_use_is_refused_with_the_number_of_the_process(open_tier, tmp_path):
    tier = open_tier()
    write(tier, *chain(1))
    with pytest.raises(ConfigError, match=rf"disk_cache_dir {tmp_path} is in use .* by process {os.getpid()} "):
        open_tier()
    other = (
        "import sys; sys.path.insert(0, '.')\n"
        "from ksana_jax.kv.disk.tier import *; from ksana_jax.kv.layout import Leaf\n"
        f"DiskTier({str(tmp_path)!r}, BlockFormat('a model', (Leaf('kv', (2, 2, 3, 4), 'float32'),)), 1)"
    )
    failed = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
    assert f"is in use for this model by process {os.getpid()} " in failed.stderr and failed.returncode == 1
    assert read(tier, *chain(1))
    tier.close()
    assert read(open_tier(), *chain(1))


def test_a_tier_that_is_dropped_without_closing_lets_the_folder_go(tmp_path):
    tier = DiskTier(tmp_path, FORMAT, PLENTY)
    write(tier, *chain(1))
    tier.flush()
    del tier
    for _ in range(200):  # the worker may still hold its last task
        try:
            DiskTier(tmp_path, FORMAT, PLENTY).close()
            return
        except ConfigError:
            time.sleep(0.01)
    raise AssertionError("the folder is still locked")


def test_a_folder_of_ten_thousand_files_is_opened_by_names_alone(open_tier):
    with contextlib.closing(open_tier()) as tier:
        folder = tier.folder
    for number in range(10_000):
        (folder / f"{number:064x}.kv").touch()
    began = time.perf_counter()
    tier = open_tier()
    assert time.perf_counter() - began < 2  # 0.06 s here; reading headers would take ten times that
    assert len(tier.keys()) == 10_000 and not open_tier.told


# ------------------------------------------------------------------ budget


def test_the_budget_holds_and_the_least_recently_used_goes_first(open_tier):
    tier = open_tier(budget=3 * FILE)
    a, b, c, d, e = (chain(1, name)[0] for name in "abcde")
    write(tier, a, b, c)
    assert read(tier, a)
    write(tier, d)
    assert_books(tier)
    assert [x.key in tier for x in (a, b, c, d)] == [True, False, True, True]
    write(tier, e)
    assert [x.key in tier for x in (a, c, d, e)] == [True, False, True, True]
    assert tier.counters.evicted == 2 and all(read(tier, x) for x in (a, d, e))


def test_children_go_before_their_parents(open_tier):
    tier = open_tier(budget=6 * FILE + 10)
    text = chain(5)
    write(tier, *text)
    others = [chain(1, f"other{n}")[0] for n in range(6)]
    left = []
    for other in others[:5]:
        write(tier, other)
        assert read(tier, other)
        left.append([b.key in tier for b in text].index(False) if any(b.key not in tier for b in text) else 5)
    assert left == [5, 4, 3, 2, 1]
    assert_books(tier)


def test_a_text_longer_than_the_budget_that_comes_from_its_end_keeps_its_beginning(open_tier):
    tier = open_tier(budget=3 * FILE + 10)
    text = chain(6)
    write(tier, *text[::-1])  # as blocks are evicted from the host
    assert [b.key in tier for b in text] == [True] * 3 + [False] * 3
    assert_books(tier)


def test_a_block_does_not_push_out_what_it_continues(open_tier):
    tier = open_tier(budget=3 * FILE)
    text = chain(4)
    write(tier, *text)
    assert [b.key in tier for b in text] == [True] * 3 + [False] and tier.counters.dropped == 1
    assert_books(tier)


def test_use_and_parents_count_across_restarts(open_tier):
    a, b, c = (chain(3, name) for name in "abc")
    with contextlib.closing(open_tier(budget=9 * FILE)) as tier:
        write(tier, *a, *b)
        for n, facts in enumerate((*b, *a)):  # written first, used last; times as a slow disk would give them
            assert read(tier, facts)
            os.utime(tier._path(facts.key), ns=(n * 10**9, n * 10**9))
    tier = open_tier(budget=6 * FILE)
    write(tier, *c[:2])
    assert [x.key in tier for x in b] == [True, False, False] and all(x.key in tier for x in a)
    assert_books(tier)


def test_reading_marks_a_file_as_used_for_the_next_start(open_tier):
    tier = open_tier()
    (facts,) = chain(1)
    write(tier, facts)
    os.utime(tier._path(facts.key), (0, 0))
    assert read(tier, facts)
    assert tier._path(facts.key).stat().st_mtime > 10**9


def test_a_smaller_budget_takes_effect_at_the_start(open_tier):
    text = chain(8)
    with contextlib.closing(open_tier()) as tier:
        write(tier, *text)
    tier = open_tier(budget=3 * FILE + 10)
    assert [b.key in tier for b in text] == [True] * 3 + [False] * 5
    assert_books(tier)


def test_a_budget_below_one_file_keeps_nothing_with_one_warning(open_tier):
    worker = Later()
    tier = open_tier(budget=FILE - 1, executor=worker)
    write(tier, *chain(3))
    worker.run()
    write(tier, *chain(3))
    assert not worker.tasks and not files(tier) and not tier.keys()
    assert tier.enabled and tier.counters.dropped == 6
    assert open_tier.told == [f"disk_cache_bytes is {FILE - 1:,}, one block takes {FILE:,}: none is kept on disk"]


# ------------------------------------------------------------------ damage


def flip(place):
    def damage(content):
        index = place if place >= 0 else len(content) + place
        return content[:index] + bytes([content[index] ^ 4]) + content[index + 1 :]

    return damage


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


def test_damaged_headers_do_not_stop_eviction(open_tier):
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


# ------------------------------------------------------------------ errors of the disk


def io_error():
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def a_busy_day(tier) -> list[bool]:
    """Writes, reads, evictions, a discard, a read; each answer is checked to be right or a miss."""
    found = []
    for name in "abcd":
        text = chain(3, name)
        write(tier, *text)
        found += [read(tier, facts) for facts in text]
    tier.discard(chain(1, "d")[0].key)
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
            f"the disk cache in {tier.folder} is off, requests go on without it: OSError: [Errno "
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
    tier.discard(chain(5)[4].key)
    failpoints.arm("disk.half_written", "oserror", nth=1)
    worker.run()
    assert [f.result() for f in futures] == [False] * 4 and len(open_tier.told) == 1
    assert files(tier) == there  # nor is the discarded file touched
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
    """The kernel's own error: a limit on file size stands for a full disk."""
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


# ------------------------------------------------------------------ what others put into the folder


@pytest.fixture
def outside(tmp_path):
    """A file of somebody else's; it must stay as it is."""
    path = tmp_path / "outside"
    path.write_bytes(b"precious")
    yield path
    assert path.read_bytes() == b"precious"


def fifo(path, outside):
    os.mkfifo(path)


def link(path, outside):
    path.symlink_to(outside)


def in_time(function):
    """The result of a call that must not wait for ever."""
    return concurrent.futures.ThreadPoolExecutor(1).submit(function).result(timeout=10)


@pytest.mark.parametrize("put", [link, fifo, lambda path, outside: os.link(outside, path)])
def test_a_lock_that_is_no_file_of_ours_turns_the_tier_off(open_tier, outside, put):
    with contextlib.closing(open_tier()) as tier:
        folder = tier.folder
    (folder / "lock").unlink()
    put(folder / "lock", outside)
    tier = in_time(open_tier)
    write(tier, *chain(1))
    (message,) = open_tier.told
    assert not tier.enabled and message.startswith(f"the disk cache in {folder} is off, requests go on without it:")


def test_a_folder_of_blocks_that_is_a_link_turns_the_tier_off(open_tier, tmp_path):
    with contextlib.closing(open_tier()) as tier:
        folder = tier.folder
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path / "elsewhere")
    tier = open_tier()
    write(tier, *chain(1))
    assert not tier.enabled and "is a link, must be a folder" in open_tier.told[0]
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("put", [link, fifo])
def test_a_temporary_file_that_is_put_there_meanwhile_is_not_written_to(open_tier, outside, put):
    tier = open_tier(executor=None)
    (facts,) = chain(1)
    path = tier._path(facts.key, "tmp")
    put(path, outside)
    write(tier, facts)
    in_time(tier.flush)
    assert not tier.enabled and "FileExistsError" in open_tier.told[0] and os.path.lexists(path)


def test_a_fifo_in_place_of_a_block_keeps_nobody_waiting(open_tier, outside):
    with contextlib.closing(open_tier()) as tier:
        write(tier, *chain(2))
    tier = open_tier(executor=None)
    a, b = chain(2)
    for facts in (a, b):
        tier._path(facts.key).unlink()
        fifo(tier._path(facts.key), outside)
    assert in_time(lambda: tier.facts(a.key)) is None
    assert not read(tier, b)
    in_time(tier.close)
    assert len(open_tier.told) == 1 and "is a FIFO, must be a plain file" in open_tier.told[0]


def test_a_block_that_became_a_link_changes_nothing_at_its_end(open_tier, outside):
    tier = open_tier()
    (facts,) = chain(1)
    write(tier, facts)
    tier._path(facts.key).unlink()
    link(tier._path(facts.key), outside)
    before = outside.stat()
    assert not read(tier, facts)
    assert outside.stat().st_mtime_ns == before.st_mtime_ns


def test_files_of_other_names_are_left_alone(open_tier):
    with contextlib.closing(open_tier()) as tier:
        folder = tier.folder
    names = ["deadbeef.kv", "cafe.tmp", "notes.tmp", f"{'A' * 64}.kv", f"{'a' * 66}.tmp", f"{'a' * 64}.kv.bak"]
    for name in names:
        (folder / name).write_text("somebody's")
    (folder / f"{'b' * 64}.tmp").mkdir()
    tier = open_tier(budget=2 * FILE)
    write(tier, *chain(4))
    assert tier.enabled and all((folder / name).read_text() == "somebody's" for name in names)
    assert not open_tier.told and not tier.counters.misses_corrupt
    assert (folder / f"{'b' * 64}.tmp").is_dir()


def test_of_two_tiers_that_opened_one_folder_the_first_turns_itself_off(open_tier):
    first = open_tier()
    a, b, c = chain(3)
    write(first, a)
    (first.folder / "lock").unlink()
    second = open_tier()
    write(second, b)
    assert not read(first, a) and not first.enabled
    write(first, c)
    (message,) = open_tier.told
    assert "lock was removed and made again: another process may use the folder" in message
    assert read(second, a) and read(second, b) and second.enabled
    assert_books(second)


# ------------------------------------------------------------------ everything at once

BLOCKS = [*chain(4, "a"), *chain(3, "b"), *chain(2, "c", parent=chain(2, "a")[-1].key)]
ACTIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, len(BLOCKS) - 1), st.integers(0, 9)),
    st.tuples(st.just("read"), st.integers(0, len(BLOCKS) - 1), st.just(0)),
    st.tuples(st.just("discard"), st.integers(0, len(BLOCKS) - 1), st.just(0)),
    st.tuples(st.sampled_from(["cut", "flip"]), st.integers(0, len(BLOCKS) - 1), st.integers(0, 10**6)),
    st.tuples(st.just("swap"), st.integers(0, len(BLOCKS) - 1), st.integers(0, len(BLOCKS) - 1)),
    st.tuples(st.just("restart"), st.just(0), st.integers(0, 9)),
)


@settings(max_examples=120)
@given(budget=st.integers(0, 10), actions=st.lists(ACTIONS, max_size=40))
def test_what_is_read_is_always_what_was_written(tmp_path_factory, budget, actions):
    folder = tmp_path_factory.mktemp("disk")
    told, content, damaged = [], {}, set()

    def start(budget):
        return DiskTier(folder, FORMAT, budget * FILE + 20, executor=AtOnce(), warn=told.append)

    tier = start(budget)
    for action, number, what in actions:
        facts = BLOCKS[number]
        path, there = tier._path(facts.key), facts.key in tier
        if action == "write":
            write(tier, facts, generation=what)
            if not there:
                content[facts.key] = what
        elif action == "read":
            assert read(tier, facts, content.get(facts.key, 0)) == (there and facts.key not in damaged)
        elif action == "discard":
            tier.discard(facts.key)
        elif action == "restart":
            tier.close()
            (folder / tier.folder.name / f"{'0a' * 32}.tmp").write_bytes(b"left")
            tier = start(what)
        elif there:
            old = path.read_bytes()
            if action == "cut":
                path.write_bytes(old[: what % len(old)])
            elif action == "flip":
                path.write_bytes(flip(what % len(old))(old))
            elif BLOCKS[what].key in tier:
                path.write_bytes(tier._path(BLOCKS[what].key).read_bytes())
            if path.read_bytes() != old:
                damaged.add(facts.key)
        damaged &= set(tier.keys())
        if not damaged:
            assert_books(tier)
        assert tier.enabled
    for facts in BLOCKS:
        there = facts.key in tier and facts.key not in damaged
        assert read(tier, facts, content.get(facts.key, 0)) == there
    assert_books(tier)
    tier.close()


def test_two_threads_write_read_and_discard_at_will(open_tier):
    """One asks as the engine does, the other takes away as an inspector might; the worker is the third."""
    tier = open_tier(budget=6 * FILE, executor=None)
    stop = threading.Event()

    def discard():
        rng = np.random.default_rng(0)
        while not stop.wait(0.0002):
            tier.discard(BLOCKS[rng.integers(len(BLOCKS))].key)
            tier.facts(BLOCKS[rng.integers(len(BLOCKS))].key)

    thread = threading.Thread(target=discard)
    thread.start()
    rng, found = np.random.default_rng(1), 0
    try:
        for _ in range(600):
            facts = BLOCKS[rng.integers(len(BLOCKS))]
            if rng.random() < 0.5:
                write(tier, facts)
            else:
                found += read(tier, facts)
    finally:
        stop.set()
        thread.join()
    tier.flush()
    assert found > 50 and tier.enabled and not open_tier.told
    assert_books(tier)
