"""Runs the tests of `on_devices` with eight devices, all of them parts of this CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "32", "JAX_PLATFORMS": "cpu"}


def run(*arguments: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    ran = subprocess.run(
        command, env=os.environ | DEVICES, cwd=HERE.parents[1], capture_output=True, text=True, timeout=900, check=False
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout


def test_on_eight_devices():
    run("-m", "not soak", str(HERE / "on_devices"))


@pytest.mark.soak
@pytest.mark.parametrize("file", sorted(path.stem for path in (HERE / "on_devices").glob("test_*.py")))
def test_soak_on_eight_devices(file):
    run("-m", "soak", str(HERE / "on_devices" / f"{file}.py"))
