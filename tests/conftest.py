"""Settings of every test: the CPU, compiled steps kept between runs, and the same hypothesis examples each time."""

import hashlib
import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

import hypothesis

MAX_CACHE_BYTES = 2 * 2**30

# The same examples in every run; `pytest --hypothesis-profile=explore` draws new ones.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config):
    # Environment variables rather than jax.config: they reach the commands that tests start, and jax stays unimported.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if getattr(config, "cache", None) is None:  # pytest -p no:cacheprovider
        return
    folder = config.cache.mkdir("jax") / _machine()
    if not hasattr(config, "workerinput"):
        _start_afresh_when_large(folder)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_report_header(config):
    return f"jax {version('jax')}, jaxlib {version('jaxlib')} on {os.environ['JAX_PLATFORMS']}"


def _machine() -> str:
    """A name for this kind of CPU: jax's cache keys carry its version and flags, but not the instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:12]}"


def _start_afresh_when_large(folder: Path) -> None:
    # Every change of a compiled step leaves its old entry behind.
    if folder.is_dir() and sum(entry.stat().st_size for entry in folder.iterdir()) > MAX_CACHE_BYTES:
        shutil.rmtree(folder)
