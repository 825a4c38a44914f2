"""Where compiled steps are kept."""

import os

import pytest

from ksana_jax import compilation_cache
from ksana_jax.compilation_cache import keep_compiled_steps


@pytest.fixture
def unset(monkeypatch):
    for name in [n for n in os.environ if n.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))]:
        monkeypatch.delenv(name)
    # Set by the code under test: let monkeypatch take them away again.
    for name in ("DIR", "MIN_COMPILE_TIME_SECS", "MIN_ENTRY_SIZE_BYTES"):
        prefix = "JAX_COMPILATION_CACHE_" if name == "DIR" else "JAX_PERSISTENT_CACHE_"
        monkeypatch.setenv(prefix + name, "x")
        monkeypatch.delenv(prefix + name)


def test_each_kind_of_processor_has_a_folder_of_its_own(unset, tmp_path):
    keep_compiled_steps(tmp_path)
    folder = os.environ["JAX_COMPILATION_CACHE_DIR"]
    assert folder.startswith(str(tmp_path)) and folder != str(tmp_path)


def test_what_the_environment_says_goes_first(unset, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    keep_compiled_steps(tmp_path)
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "elsewhere"


def test_a_folder_that_has_grown_too_large_starts_afresh(unset, tmp_path, monkeypatch):
    monkeypatch.setattr(compilation_cache, "MAX_CACHE_BYTES", 10)
    keep_compiled_steps(tmp_path)
    entry = tmp_path / os.path.basename(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "entry"
    entry.parent.mkdir()
    entry.write_bytes(b"x" * 10)
    keep_compiled_steps(tmp_path)
    assert entry.exists()
    entry.write_bytes(b"x" * 11)
    keep_compiled_steps(tmp_path)
    assert not entry.parent.exists()
