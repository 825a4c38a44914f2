"""Where compiled steps are kept."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ksana_jax.core import compilation_cache, files
from ksana_jax.core.compilation_cache import keep_compiled_steps


@pytest.fixture
def unset(monkeypatch):
    """An environment that says nothing of a cache, in a process that looks as if jax were not imported."""
    monkeypatch.delitem(sys.modules, "jax", raising=False)
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
    for size in (10, 11):
        entry.write_bytes(b"x" * size)
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")  # as in the next process
        keep_compiled_steps(tmp_path)
        assert entry.exists() == (size == 10)


@pytest.mark.parametrize("home", ["file", "file/below", "/proc"])
def test_where_no_folder_can_be_made_a_warning_says_why(home, unset, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
    with pytest.warns(UserWarning, match=rf"not kept for other processes: \[Errno \d+\] .*{tmp_path / home}"):
        keep_compiled_steps()
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_a_user_without_a_home_is_warned(unset, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(UserWarning, match="no home directory; XDG_CACHE_HOME names a folder for caches"):
        keep_compiled_steps()


def test_nothing_is_made_for_a_cache_that_is_turned_off(unset, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    keep_compiled_steps(tmp_path)
    assert not list(tmp_path.iterdir()) and "JAX_COMPILATION_CACHE_DIR" not in os.environ


@pytest.fixture
def jax_cache(unset, tmp_path, monkeypatch):
    """jax's own cache in a folder, as it was before this process used it."""
    from jax._src.lru_cache import LRUCache

    monkeypatch.setitem(sys.modules, "jax", importlib.import_module("jax"))
    put = LRUCache.put
    monkeypatch.setattr(LRUCache, "put", getattr(put, "whole", put))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    keep_compiled_steps(tmp_path)
    return LRUCache(str(tmp_path / "entries"), max_size=-1)


def test_no_process_reads_the_half_of_an_entry_that_another_one_writes(jax_cache, monkeypatch):
    seen, rename = [], os.replace

    def replace(temporary, entry):
        seen.append((Path(temporary).read_bytes(), jax_cache.get("key")))
        rename(temporary, entry)

    monkeypatch.setattr(files.os, "replace", replace)
    jax_cache.put("key", b"value")
    assert seen == [(b"value", None)] and jax_cache.get("key") == b"value"
    jax_cache.put("key", b"another")  # which jax keeps out
    assert jax_cache.get("key") == b"value" and len(seen) == 1
    assert [path.name for path in Path(jax_cache.path).iterdir()] == ["key-cache"]


def test_a_cache_that_users_limit_is_left_to_jax(jax_cache, tmp_path):
    from jax._src.lru_cache import LRUCache

    limited = LRUCache(str(tmp_path / "limited"), max_size=10)
    for key in ("first", "second", "third"):
        limited.put(key, b"1234")
    assert [limited.get(key) for key in ("first", "second", "third")] == [None, b"1234", b"1234"]


# What a Python user does, jax imported and used before there is an LLM.
PYTHON_USER = """
import jax
jax.jit(lambda x: x + 1)(1)
from ksana_jax import LLM, SamplingParams
from ksana_jax.core.compilation_cache import cache_use
with cache_use() as use:
    llm = LLM("ksana-tiny", max_num_seqs=1, max_num_batched_tokens=32)
    llm.generate("def", SamplingParams(max_tokens=2, temperature=0))
print(jax.config.jax_compilation_cache_dir, use.asked, use.compiled)
"""


def run_as_python_user(home: Path, **more: str) -> tuple[str, int, int]:
    """Returns the cache's folder, how many functions were asked of it, and how many of them were compiled."""
    native = home / "ksana_jax" / "native"
    if not native.exists():  # the machine's own: compiling C++ again would take longer than all else
        native.parent.mkdir()
        native.symlink_to(compilation_cache.cache_folder("native"))
    env = {n: v for n, v in os.environ.items() if not n.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))}
    done = subprocess.run(
        [sys.executable, "-c", PYTHON_USER],
        env=env | {"XDG_CACHE_HOME": str(home), **more},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    folder, asked, compiled = done.stdout.rsplit(maxsplit=2)
    return folder, int(asked), int(compiled)


def test_a_second_process_finds_all_steps_of_the_first_compiled(tmp_path):
    folder, asked, compiled = run_as_python_user(tmp_path, KSANA_PROGRAMS="off")
    assert Path(folder).is_relative_to(tmp_path)
    assert compiled >= 4, "a prefill step, a decode step, and the choice of a token after each"
    assert run_as_python_user(tmp_path, KSANA_PROGRAMS="off") == (folder, asked, 0)


def test_python_users_can_do_without_the_cache(tmp_path):
    assert run_as_python_user(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false") == ("None", 0, 0)
    assert not (tmp_path / "ksana_jax" / "compiled").exists()
