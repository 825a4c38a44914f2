"""Compiling the native kernels, and machines that cannot: they compute with XLA, and say why."""

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from ksana_jax.native import build, callers, compiler
from tests.machine import compiled, no_compiler

ENGINE = """
from ksana_jax import LLM, SamplingParams
llm = LLM("ksana-tiny", max_num_seqs=1, max_num_batched_tokens=32)
[output] = llm.generate("def", SamplingParams(max_tokens=1, temperature=0))
print(llm.runner.implementation.name, len(output.outputs[0].token_ids))
"""


@pytest.fixture
def asked_again(monkeypatch):
    """The library is compiled and loaded as in a new process with nothing hidden."""
    monkeypatch.delenv("KSANA_HIDE", raising=False)
    monkeypatch.setattr(build, "_library", functools.cache(build._library.__wrapped__))


@pytest.mark.skipif((no_compiler or "").startswith("no C++ compiler"), reason=str(no_compiler))
def test_where_there_is_a_compiler_it_compiles():
    assert not no_compiler, no_compiler  # or all tests of the kernels would be skipped


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="needs Debian's g++-aarch64-linux-gnu")
@pytest.mark.parametrize("march", ["armv8-a", "armv8.2-a+dotprod"])
def test_the_library_compiles_for_arm(monkeypatch, tmp_path, march):
    monkeypatch.setenv("CXX", "aarch64-linux-gnu-g++")
    path = compiler.compile_into(tmp_path, (*compiler.PORTABLE, f"-march={march}", "-Wall", "-Wextra", "-Werror"))
    assert path.read_bytes()[18:20] == b"\xb7\x00"  # EM_AARCH64


def test_a_machine_without_a_compiler_says_so(monkeypatch, tmp_path, asked_again):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.why_missing() == "no C++ compiler: none of c++, g++, clang++ is installed"


def test_a_missing_library_keeps_nothing_alive_of_those_that_ask_for_it(monkeypatch, asked_again):
    monkeypatch.setenv("CXX", "/nowhere/c++")

    class Engine:
        pass

    def engine_that_asks():
        engine = Engine()
        with contextlib.suppress(compiler.CannotBuild):
            build.library()
        return weakref.ref(engine)

    assert [engine_that_asks()() for _ in range(2)] == [None, None]


@compiled
def test_a_build_that_has_begun_is_waited_for(monkeypatch, tmp_path, asked_again):
    library, built = build.library(), []

    def compile_slowly(command, headers, folder, name):
        time.sleep(0.1)
        folder.mkdir(parents=True)
        built.append(Path(shutil.copy(library, folder)))
        return built[0]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    build._library.cache_clear()
    build.begin()
    assert build.library() == build.library()
    assert built == [build.library()]


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path, asked_again):
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'first line' >&2\necho 'cannot do that' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build.why_missing() == f"{broken} failed with exit status 3: cannot do that"
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.parametrize(
    "given, reason",
    [
        ("/nowhere/c++", "/nowhere/c++ did not run: [Errno 2] No such file or directory: '/nowhere/c++'"),
        ("/nowhere/ccache g++", "/nowhere/ccache did not run: [Errno 2] No such file or directory: '/nowhere/ccache'"),
        ("g++ '", 'CXX is "g++ \'": No closing quotation'),
    ],
)
def test_a_compiler_that_cannot_be_started_is_named(given, reason, monkeypatch, asked_again):
    monkeypatch.setenv("CXX", given)
    assert build.why_missing() == reason


def test_a_compiler_may_have_arguments_as_in_make(monkeypatch, tmp_path, asked_again):
    launcher = tmp_path / "my launcher"
    launcher.write_text('#!/bin/sh\necho "$@" >&2\nexit 4\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{launcher}' c++ -Og")
    assert build.why_missing() == f"{launcher} failed with exit status 4: c++ -Og --version"


@compiled
@pytest.mark.parametrize("home", ["file", "file/below", "/proc"])
def test_a_cache_folder_that_cannot_be_made_is_named(home, monkeypatch, tmp_path, asked_again):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
    reason = build.why_missing()
    assert reason.startswith("the compiled library cannot be kept or loaded: ")
    assert "[Errno" in reason and str(tmp_path / home) in reason


@compiled
def test_a_user_without_a_home_computes_with_xla(monkeypatch, asked_again):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert build.why_missing().endswith("the user has no home directory; XDG_CACHE_HOME names a folder for caches")


@compiled
def test_a_library_that_cannot_be_loaded_is_named(monkeypatch, tmp_path, asked_again):
    name, content = build.library().name.rpartition("-")[0], b"not a library"
    path = tmp_path / "ksana_jax" / "native" / f"{name}-{hashlib.sha256(content).hexdigest()[:24]}.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._library.cache_clear()
    assert build.why_missing().startswith(f"the compiled library cannot be kept or loaded: {path}: ")


@compiled
@pytest.mark.parametrize("size", [0, 1000, -1])
def test_a_truncated_library_is_compiled_again(monkeypatch, tmp_path, asked_again, size):
    library, compile_again = build.library(), []

    def compile_quickly(command, headers, folder, name):
        compile_again.append(name)
        return Path(shutil.copy(library, folder))

    folder = tmp_path / "ksana_jax" / "native"
    folder.mkdir(parents=True)
    (folder / library.name).write_bytes(library.read_bytes()[:size])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_compile", compile_quickly)
    for _ in range(2):
        build._library.cache_clear()
        assert build.why_missing() is None and build.library().read_bytes() == library.read_bytes()
    assert len(compile_again) == 1 and [path.name for path in folder.iterdir()] == [library.name]


def test_what_killed_builds_left_is_removed_and_what_others_build_is_not(tmp_path):
    ours, begun, killed, empty = (tmp_path / f".build-{name}" for name in ("ours", "begun", "killed", "empty"))
    for folder in (ours, begun, killed, empty):
        folder.mkdir()
    (ours / "norm.o").touch()
    (killed / "norm.o").touch()
    os.utime(empty, (0, 0))
    with compiler._locked(ours):
        compiler._remove_unfinished(tmp_path)
        assert {*tmp_path.iterdir()} == {ours, begun}


def test_an_engine_goes_on_with_xla_where_nothing_can_be_kept(tmp_path):
    (tmp_path / "file").touch()
    unset = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    done = subprocess.run(
        [sys.executable, "-c", ENGINE],
        env=environment | {"XDG_CACHE_HOME": str(tmp_path / "file"), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["xla", "1"]
    assert "UserWarning: compiled steps are not kept for other processes: [Errno 20] Not a directory" in done.stderr


def test_a_plugin_that_drops_functions_of_newer_ffi_headers_is_said_to_be_older(monkeypatch):
    monkeypatch.setattr(callers, "rms_norm", lambda *_, eps: float("No FFI handler registered for it"))
    assert "older than their FFI headers" in str(callers._tried.__wrapped__(callers.jax.devices()[0]))
