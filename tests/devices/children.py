"""Processes of their own for tests, in which jax has not started."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

COMMON = """
import ctypes, warnings
import pytest
from ksana_jax.devices.starting import started, use_device
from tests import loopback
from tests.loopback.wrapper import Loopback, library, opened
from ksana_jax.core.errors import ConfigError
"""


def child(code: str, before: str = "", **environment: str) -> str:
    """Runs code in a process of its own, which must end without an error; returns its output.

    before: code that comes first, and is not indented.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", COMMON + before + textwrap.dedent(code) + "print('end')"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.endswith("end\n"), done.stdout + done.stderr
    return done.stdout


def run_tests(
    device: Mapping[str, Any], *arguments: str, timeout: float = 300, environment: Mapping[str, str] | None = None
) -> str:
    """Runs pytest in a process on a device, with some environment variables; returns its output, whose last line counts
    what passed."""
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
