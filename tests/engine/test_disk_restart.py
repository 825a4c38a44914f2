"""An engine that finds prefixes on disk gives the same as one that computes them, whatever happened to the files."""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.kv.disk import failpoints
from ksana_jax.kv.disk.tier import DiskTier
from tests.engine.small import VOCAB, make_llm, tokens_of

ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(5)
SHARED = RNG.integers(2, VOCAB, 24)
PROMPTS = [{"prompt_token_ids": np.concatenate([SHARED, RNG.integers(2, VOCAB, n)])} for n in (1, 9, 16)]
PROMPTS += [{"prompt_token_ids": RNG.integers(2, VOCAB, 33)}]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
SIZES = {"block_size": 4, "num_blocks": 20, "max_num_seqs": 2, "max_num_batched_tokens": 32}
WRITES = ("through", "back")


@contextlib.contextmanager
def engine(folder, write="through", dtype="f32", **settings):
    settings = SIZES | {"host_cache_bytes": 2**18} | settings
    llm = make_llm(dtype=dtype, enable_prefix_caching=True, disk_cache_dir=str(folder), cache_write=write, **settings)
    # A thread that traces a step leaves little of the interpreter to the one that reads files.
    llm.engine.memory.disk_reads._timeout_s = 60.0
    yield llm
    llm.close()


@functools.cache
def cold(dtype: str = "f32") -> list[list[int]]:
    """Output of each prompt alone in an engine without any cache."""
    llm = make_llm(dtype=dtype, **SIZES)
    return [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


def fill(folder, **settings) -> list[Path]:
    """Runs all prompts once; the files this leaves."""
    with engine(folder, **settings) as llm:
        assert tokens_of(llm, PROMPTS, GREEDY) == cold(settings.get("dtype", "f32"))
    return sorted(folder.rglob("*.kv"))


def disk_of(llm) -> DiskTier:
    disk = llm.engine.memory.disk
    assert disk is not None
    return disk


@pytest.mark.parametrize("write", WRITES)
def test_a_new_engine_continues_from_the_disk_with_the_same_tokens(tmp_path, write):
    written = fill(tmp_path, write=write)
    with engine(tmp_path, write) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == cold()
        assert llm.engine.memory.counters.hits_disk > 0 and disk_of(llm).counters.read > 0
        # All of a prompt but what must be computed: its last token, and the block that is not full.
        assert [o.num_cached_tokens for o in outputs] == [(len(p["prompt_token_ids"]) - 1) // 4 * 4 for p in PROMPTS]
    assert sorted(tmp_path.rglob("*.kv")) == written  # nothing is computed or written twice


def test_write_through_needs_no_orderly_end(tmp_path):
    with engine(tmp_path, "through") as llm:
        assert tokens_of(llm, PROMPTS, GREEDY) == cold()
        disk_of(llm).close()  # without LLM.close, which brings the rest to the disk
        before = len(list(tmp_path.rglob("*.kv")))
    assert before > 0
    with engine(tmp_path) as llm:
        assert tokens_of(llm, PROMPTS, GREEDY) == cold() and llm.engine.memory.counters.hits_disk > 0


def test_written_back_blocks_reach_the_disk_when_the_host_is_full(tmp_path):
    with engine(tmp_path, "back", host_cache_bytes=12 * 2**10) as llm:
        assert tokens_of(llm, PROMPTS, GREEDY) == cold() == tokens_of(llm, PROMPTS, GREEDY)
        disk_of(llm).flush()
        assert llm.engine.memory.counters.replaced_host > 0 and disk_of(llm).counters.written > 0
        assert llm.engine.memory.counters.hits_disk > 0


def test_drop_writes_nothing(tmp_path):
    assert fill(tmp_path, write="drop") == []


@pytest.mark.parametrize("write", WRITES)
def test_damaged_files_are_computed_again_with_the_same_tokens(tmp_path, write):
    written = fill(tmp_path, write=write)
    for number, path in enumerate(written):
        content = bytearray(path.read_bytes())
        if number % 3 == 0:
            content = content[: len(content) // 2]
        elif number % 3 == 1:
            content[-1 - number] ^= 1
        else:
            content[100 + number] ^= 16
        path.write_bytes(content)
    with engine(tmp_path, write) as llm:
        with pytest.warns(UserWarning, match="is not a block of this cache and was removed: it"):
            assert tokens_of(llm, PROMPTS, GREEDY) == cold()
        assert llm.engine.memory.counters.hits_disk == 0
        assert disk_of(llm).enabled
        num_found = disk_of(llm).counters.misses_corrupt
    with engine(tmp_path, write) as llm:  # what it came upon has been replaced
        assert tokens_of(llm, PROMPTS, GREEDY) == cold()
        assert llm.engine.memory.counters.hits_disk > 0 and disk_of(llm).counters.misses_corrupt < num_found


def test_swapped_files_are_never_taken_for_each_other(tmp_path):
    written = fill(tmp_path)
    contents = [path.read_bytes() for path in written]
    for path, content in zip(written, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    with engine(tmp_path) as llm:
        with pytest.warns(UserWarning, match="it holds block"):
            assert tokens_of(llm, PROMPTS, GREEDY) == cold()
        assert llm.engine.memory.counters.hits_disk == 0


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_an_engine_of_another_dtype_finds_nothing_and_harms_nothing(tmp_path, dtype):
    written = fill(tmp_path)
    for hits in (False, True):
        with engine(tmp_path, dtype=dtype) as llm:
            assert tokens_of(llm, PROMPTS, GREEDY) == cold(dtype)
            assert (llm.engine.memory.counters.hits_disk > 0) is hits
    with engine(tmp_path) as llm:
        assert tokens_of(llm, PROMPTS, GREEDY) == cold() and llm.engine.memory.counters.hits_disk > 0
    assert set(written) < set(tmp_path.rglob("*.kv"))


@pytest.mark.parametrize("point", ["disk.half_written", "disk.before_read"])
def test_a_disk_that_fails_is_turned_off_and_requests_go_on(tmp_path, point):
    fill(tmp_path)
    for path in list(tmp_path.rglob("*.kv")):
        start = re.search(rb'"start": (\d+)', path.read_bytes())
        if start and int(start[1]) >= 16:
            path.unlink()  # so that there is something to write, and more than one block of a text to read
    failpoints.arm(point, "oserror", nth=2)
    with pytest.warns(UserWarning) as told, engine(tmp_path) as llm:
        for _ in range(2):
            assert tokens_of(llm, PROMPTS, GREEDY) == cold()
        disk_of(llm).flush()
        assert not disk_of(llm).enabled
    assert sum("requests continue without it" in str(w.message) for w in told) == 1


def test_two_engines_do_not_share_a_folder(tmp_path):
    with engine(tmp_path):
        with pytest.raises(ConfigError, match=f"is in use for this model by process {os.getpid()}"):
            with engine(tmp_path):
                pass


CHILD = """
import sys
sys.path.insert(0, ".")
from tests.engine.test_disk_restart import GREEDY, PROMPTS, engine, tokens_of
with engine(sys.argv[1]) as llm:
    print(tokens_of(llm, PROMPTS, GREEDY), flush=True)
"""


def test_an_engine_killed_in_the_middle_of_a_write_is_succeeded_by_one_with_the_same_tokens(tmp_path):
    env = {**os.environ, "KSANA_FAILPOINTS": "disk.half_written=kill:12"}
    killed = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(list(tmp_path.rglob("*.kv"))) == 11 and len(list(tmp_path.rglob("*.tmp"))) == 1
    with engine(tmp_path) as llm:
        assert not list(tmp_path.rglob("*.tmp"))
        assert tokens_of(llm, PROMPTS, GREEDY) == cold() and llm.engine.memory.counters.hits_disk > 0
