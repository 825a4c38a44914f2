"""Processes of their own for tests, in which jax has not started."""

import os
import subprocess
import sys
import textwrap

COMMON = """
import ctypes, warnings
import pytest
from ksana_jax.devices.starting import started, use_device
from ksana_jax.devices.loopback.plugin import LoopbackPlugin
from ksana_jax.forks import outlives_python
from ksana_jax.devices.loopback.stub_library import stub_library
from ksana_jax.errors import ConfigError
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
