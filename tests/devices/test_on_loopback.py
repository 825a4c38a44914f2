"""Runs tests on the loopback, in processes whose jax was started on it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GIB = 2**30


def run_tests(*arguments: str, timeout: float = 300, **options) -> str:
    """Runs pytest in a process on the loopback; returns its output, whose last line counts what passed."""
    device = {"platform": "npu", "plugin": "loopback", "options": options}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments],
        env={**os.environ, "KSANA_TEST_DEVICE": json.dumps(device)},
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
