"""Foreign files in the folder of a disk tier stay as they are."""

import concurrent.futures
import contextlib
import os
import shutil
import stat

import pytest

from ksana_jax.kv.disk.tier import DiskTier
from tests.kv.disk.blocks import FORMAT, chain
from tests.kv.disk.tiers import FILE, PLENTY, assert_books, read, write


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


def test_only_their_user_can_read_blocks_which_have_the_tokens_of_prompts(tmp_path):
    before, folder = os.umask(0), tmp_path / "cache"
    try:
        with contextlib.closing(DiskTier(folder, FORMAT, PLENTY)) as tier:
            write(tier, *chain(3))
            assert read(tier, chain(1)[0])
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tier.folder.iterdir()}
    assert len(modes) == 4 and set(modes.values()) == {0o600}
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, tier.folder)] == [0o700] * 2


def test_a_folder_that_an_older_version_made_readable_is_closed_and_the_users_own_is_not(open_tier):
    with contextlib.closing(open_tier()) as tier:
        folder = tier.folder
    folder.chmod(0o755)
    folder.parent.chmod(0o755)
    with contextlib.closing(open_tier()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o755


@pytest.mark.parametrize("put", [link, fifo, lambda path, outside: os.link(outside, path)])
def test_a_lock_that_is_no_file_of_ours_turns_the_tier_off(open_tier, outside, put):
    with contextlib.closing(open_tier()) as tier:
        folder = tier.folder
    (folder / "lock").unlink()
    put(folder / "lock", outside)
    tier = in_time(open_tier)
    write(tier, *chain(1))
    (message,) = open_tier.told
    assert not tier.enabled and message.startswith(f"the disk cache in {folder} is off, requests continue without it:")


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
    assert "lock was removed and created again: another process may use the folder" in message
    assert read(second, a) and read(second, b) and second.enabled
    assert_books(second)
