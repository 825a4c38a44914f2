"""Runs the tests of `on_devices` with eight devices, all of them parts of this CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "32", "JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize("kind", ["not soak", pytest.param("soak", marks=pytest.mark.soak)])
def test_on_eight_devices(kind):
    command = [sys.executable, "-m", "pytest", "-q", "-m", kind, str(HERE / "on_devices")]
    ran = subprocess.run(
        command, env=os.environ | DEVICES, cwd=HERE.parents[1], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
