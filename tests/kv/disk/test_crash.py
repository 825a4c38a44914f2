"""A process that is killed at any point of a disk write leaves whole blocks, and nothing else after the next start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ksana_jax.kv.disk.block_file import file_bytes
from ksana_jax.kv.disk.tier import DiskTier
from tests.kv.disk.blocks import FORMAT, blank, chain, data_of

ROOT = Path(__file__).parents[3]
BLOCKS = chain(8)
ROOM = 6  # blocks within the budget
BUDGET = ROOM * file_bytes(FORMAT, BLOCKS[-1])
# Reports each block that is safely written, reads it back, and dies where it is told to.
CHILD = """
import sys
sys.path.insert(0, ".")
from ksana_jax.kv.disk.tier import DiskTier
from tests.kv.disk.blocks import FORMAT, blank, chain, data_of
assert "jax" not in sys.modules
tier = DiskTier(sys.argv[1], FORMAT, int(sys.argv[2]))
for facts in chain(4) + chain(4, "b"):
    tier.write(facts, data_of(facts))
    tier.flush()
    print(facts.key.hex(), flush=True)
    assert tier.read(facts.key, facts, blank()).result()
tier.close()
print("end", flush=True)
"""


def run_child(folder, failpoints: str) -> tuple[int, list[str]]:
    env = {**os.environ, "KSANA_FAILPOINTS": failpoints}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(BUDGET)], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, done.stdout.split()


# Blocks that are written when the process dies at the n-th call: those before, and the last one once it has its name.
# Evictions begin with the seventh block; the first two victims are the ends of the first text.
@pytest.mark.parametrize(
    ("point", "nth", "num_whole", "num_evicted"),
    [
        *[
            (f"disk.{point}", nth, nth - 1, 0)
            for point in ("before_write", "half_written", "before_rename")
            for nth in (1, 5)
        ],
        ("disk.after_rename", 1, 1, 0),
        ("disk.after_rename", 6, 6, 0),
        ("disk.before_read", 3, 3, 0),
        ("disk.half_written", 8, 7, 2),
        ("disk.before_remove", 1, 6, 0),
        ("disk.before_remove", 2, 7, 1),
    ],
)
def test_a_killed_process_leaves_whole_blocks_only(tmp_path, point, nth, num_whole, num_evicted):
    code, reported = run_child(tmp_path, f"{point}=kill:{nth}")
    assert code == -signal.SIGKILL
    blocks = chain(4) + chain(4, "b")
    assert reported == [facts.key.hex() for facts in blocks[: len(reported)]] and len(reported) <= num_whole
    told = []
    tier = DiskTier(tmp_path, FORMAT, BUDGET, warn=told.append)
    assert not list(tmp_path.rglob("*.tmp"))
    gone = {facts.key for facts in chain(4)[4 - num_evicted :]}
    for number, facts in enumerate(blocks):
        out = blank()
        found = tier.read(facts.key, facts, out).result()
        assert found == (number < num_whole and facts.key not in gone)
        assert out.tobytes() == (data_of(facts) if found else blank()).tobytes()
    for facts in blocks:  # and it goes on from there
        tier.write(facts, data_of(facts))
    tier.flush()
    assert len(tier.keys()) == ROOM and not told
    tier.close()


def test_an_unharmed_process_reaches_its_end(tmp_path):
    code, reported = run_child(tmp_path, "")
    assert code == 0 and reported[-1] == "end" and len(reported) == 9


def test_several_crashes_in_a_row_do_no_harm(tmp_path):
    for point in ("disk.half_written=kill:2", "disk.before_rename=kill:1", "disk.after_rename=kill:2"):
        assert run_child(tmp_path, point)[0] == -signal.SIGKILL
    assert run_child(tmp_path, "")[0] == 0
    assert not list(tmp_path.rglob("*.tmp"))
