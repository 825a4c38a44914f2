"""Runs tests on the loopback, in processes whose jax was started on it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GIB = 2**30


def run_tests(*arguments: str, timeout: float = 300, environment: Mapping[str, str] | None = None, **options) -> str:
    """Runs pytest in a process on the loopback, with some environment variables; returns its output, whose last line
    counts what passed."""
    device = {"platform": "npu", "plugin": "loopback", "options": options}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments],
        env={**os.environ, **(environment or {}), "KSANA_TEST_DEVICE": json.dumps(device)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_arrays_and_programs():
    output = run_tests("tests/devices/on_loopback", num_devices=2, memory_bytes=GIB, pinned_host=True)
    assert re.search(r"^(4[0-9]|[5-9][0-9]) passed in", output, re.M), output


@pytest.mark.soak
def test_the_engine_computes_with_numbers_of_8_bits_that_are_stored_as_such():
    # Where the compiler does not say that it would convert a pool, numbers are stored as they are.
    lacks = ["Executable_GetCompiledMemoryStats"]
    output = run_tests("tests/engine/test_kv_codecs.py", "-k", "by_definition and fp8", lacks=lacks)
    assert re.search(r"^2 passed", output, re.M), output


# Dealt out, so that they run in several processes at once.
ENGINE = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/engine").glob("test_*.py"))
FILES = {"blocks and sampling": ["tests/kv", "tests/sampling"]} | {f"engine {i}": ENGINE[i::4] for i in range(4)}


@pytest.mark.soak
@pytest.mark.parametrize("part", FILES)
def test_the_tests_of_blocks_sampling_and_the_engine(part):
    """What `pytest --device=loopback tests/kv tests/sampling tests/engine` runs; XLA optimises little."""
    output = run_tests(
        *FILES[part], pinned_host=True, timeout=1200, environment={"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    )
    assert re.search(r"^[1-9][0-9]+ passed", output, re.M), output


@pytest.mark.soak
def test_blocks_move_through_pinned_memory():
    output = run_tests("tests/runner/test_movers.py", "-k", "not does_not_have", pinned_host=True)
    assert re.search(r"^[1-9][0-9]* passed", output, re.M), output
