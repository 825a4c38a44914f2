"""Tests that take long and depend on few packages: `pytest --changed` runs them only when those have changed."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]

# What else than itself a file or folder of tests depends on.
PACKAGES = {
    "tests/ops": ("ksana_jax/ops", "ksana_jax/native", "pallas_kernels", "constraints.txt"),
    "tests/pallas_kernels": ("ksana_jax/ops", "pallas_kernels", "constraints.txt"),
    "tests/serve/router/test_fluid.py": ("ksana_jax/serve/router", "ksana_jax/serve/workload", "tests/serve/router"),
}


def changed_files() -> list[str] | None:
    """Files that differ from the commit of .ci/speed.base; None where git or that commit is missing."""
    command = ["git", "diff", "--name-only", (ROOT / ".ci/speed.base").read_text().strip()]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.splitlines()


def unchanged(files: list[str] | None) -> list[str]:
    """Tests to leave out; none where it is not known what has changed."""
    if files is None:
        return []
    return [tests for tests, packages in PACKAGES.items() if not any(f.startswith((tests, *packages)) for f in files)]
