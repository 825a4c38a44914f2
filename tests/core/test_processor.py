"""What the processor has, and machines that are played by hiding some of it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ksana_jax.core import processor
from ksana_jax.core.errors import ConfigError
from ksana_jax.native import build, compiler
from tests.machine import compiled

ROOT = Path(__file__).parents[2]
FLAGS = "flags\t\t: fpu avx avx2 avx512f avx512_bf16 amx_tile sse4_2"


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch):
    """This machine as it is, whatever the tests play."""
    monkeypatch.delenv("KSANA_HIDE", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.fixture
def with_avx512(monkeypatch):
    monkeypatch.setattr(processor, "_features", lambda: FLAGS)


def in_a_process(hide: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "KSANA_HIDE": hide},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_words_that_hide_nothing_are_refused(monkeypatch):
    monkeypatch.setenv("KSANA_HIDE", "avx512, avx2")
    with pytest.raises(ConfigError) as caught:
        processor.hide()
    wanted = "KSANA_HIDE is 'avx512, avx2', must be names out of avx512, compiler, cores, with commas between"
    assert str(caught.value) == wanted


def test_hidden_instruction_sets_are_not_among_the_features(with_avx512, monkeypatch):
    assert {"avx2", "avx512f", "avx512_bf16", "amx_tile"} < processor.features()
    monkeypatch.setenv("KSANA_HIDE", " avx512 ,")
    assert {"fpu", "avx", "avx2", "sse4_2"} == processor.features() - {"flags", ":"}


def test_a_played_machine_has_caches_of_its_own(with_avx512, monkeypatch):
    names = {processor.machine()}
    for hide in ("avx512", "cores", "avx512,cores", "cores,avx512"):
        monkeypatch.setenv("KSANA_HIDE", hide)
        names.add(processor.machine())
    assert len(names) == 4


def test_xla_keeps_the_flags_it_was_given(monkeypatch):
    monkeypatch.setenv("KSANA_HIDE", "avx512")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.delitem(sys.modules, "jax._src.xla_bridge", raising=False)
    for _ in range(2):
        processor.hide()
        assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2 --xla_cpu_max_isa=AVX2"


def test_xla_that_has_started_can_no_longer_be_kept_from_an_instruction_set(monkeypatch):
    import jax

    jax.devices()
    monkeypatch.setenv("KSANA_HIDE", "avx512")
    with pytest.raises(ConfigError, match="KSANA_HIDE hides avx512, and jax has already started with it"):
        processor.hide()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin processes to cores")
def test_a_process_without_its_cores_has_one_and_xla_one_thread():
    code = """
import os
from ksana_jax.core import processor
processor.hide()
import jax
jax.devices()
threads = [open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")]
print(processor.num_cores(), threads.count("tf_XLAEigen"))
"""
    assert in_a_process("cores", "-c", code) == "1 1"


def test_a_hidden_compiler_is_missing(monkeypatch):
    monkeypatch.setenv("KSANA_HIDE", "compiler")
    with pytest.raises(compiler.CannotBuild, match="no C\\+\\+ compiler: KSANA_HIDE hides it"):
        compiler.compiler_command()


@compiled
def test_a_hidden_instruction_set_is_not_compiled_in(monkeypatch, tmp_path):
    commands = []

    def compile_nothing(command, headers, folder, name):
        commands.append((command, name))
        return folder / name

    monkeypatch.setattr(compiler, "_compile", compile_nothing)
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    for hide in ("", "avx512"):
        monkeypatch.setenv("KSANA_HIDE", hide)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert "cannot be kept or loaded" in str(build._library.__wrapped__())
    (plain, name), (played, other) = commands
    assert played == [*plain, "-mno-avx512f"] and name != other


def test_ksana_doctor_says_what_is_hidden():
    text = in_a_process("cores,avx512", "-m", "ksana_jax", "doctor", "--json")
    assert "hidden     avx512, cores (KSANA_HIDE)" in text
    assert re.search(r"native     (none|AVX2 with FMA( and VNNI)?: KSANA_HIDE hides AVX-512)", text)
    found = json.loads(text.splitlines()[-1])
    assert found["hidden"] == ["avx512", "cores"] and "--xla_cpu_max_isa=AVX2" in found["xla_flags"]
    operators = {(row["operator"], row["name"]): row for row in found["operators"]}
    reason = operators["linear", "packed"]["unsupported"]
    assert reason is None or "needs a CPU with AVX2" in reason or "C++ compiler" in reason
