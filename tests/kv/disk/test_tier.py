"""The disk tier finds what it wrote, also after a restart."""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import time

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.kv.disk.tier import DiskTier
from tests.kv.disk.blocks import BF16, FORMAT, AtOnce, Later, blank, chain, data_of
from tests.kv.disk.tiers import PLENTY, assert_books, files, read, write


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
    assert len(files(tier)) == 3


def test_the_module_does_not_import_jax():
    subprocess.run(
        [sys.executable, "-c", "import ksana_jax.kv.disk.tier, sys; assert 'jax' not in sys.modules"], check=True
    )


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
    began = time.process_time()
    tier = open_tier()
    assert time.process_time() - began < 2  # 0.06 s here; reading headers would take ten times that
    assert len(tier.keys()) == 10_000 and not open_tier.told
