"""The library of a wheel that a processor gets."""

import functools
import shutil

import pytest

from ksana_jax.native import build, prebuilt
from tests.machine import compiled

ALL = {name: level for level in prebuilt.LEVELS for name in [level.name]}


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """A folder with an empty library of each level."""
    for name in ALL:
        (tmp_path / f"{name}-0123.so").touch()
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "x86_64")
    return tmp_path


@pytest.mark.parametrize("name", ALL)
def test_a_processor_gets_the_best_level_that_it_has(wheel, monkeypatch, name):
    monkeypatch.setattr(prebuilt, "features", lambda: ALL[name].needs | {"sse2"})
    found = prebuilt.find()
    assert found == wheel / f"{name}-0123.so"


def test_a_level_that_a_wheel_lacks_is_passed_over(wheel, monkeypatch):
    monkeypatch.setattr(prebuilt, "features", lambda: ALL["avx512bf16"].needs)
    (wheel / "avx512bf16-0123.so").unlink()
    found = prebuilt.find()
    assert found == wheel / "avx512vnni-0123.so"


def test_a_lesser_processor_and_another_architecture_get_none(wheel, monkeypatch):
    monkeypatch.setattr(prebuilt, "features", lambda: ALL["avx2"].needs - {"fma"})
    assert prebuilt.find() is None
    monkeypatch.setattr(prebuilt, "features", lambda: ALL["avx2"].needs)
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "aarch64")
    assert prebuilt.find() is None


@compiled
def test_a_wheels_library_is_loaded_where_there_is_no_compiler(wheel, monkeypatch):
    made = build.library()
    monkeypatch.setattr(prebuilt, "features", lambda: ALL["avx2"].needs)
    monkeypatch.setattr(build, "_library", functools.cache(build._library.__wrapped__))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    shutil.copy(made, wheel / "avx2-0123.so")
    assert build.library() == wheel / "avx2-0123.so"


def test_a_wheels_library_that_cannot_be_loaded_is_named(wheel, monkeypatch):
    monkeypatch.setattr(prebuilt, "features", lambda: ALL["avx2"].needs)
    monkeypatch.setattr(build, "_library", functools.cache(build._library.__wrapped__))
    assert f"cannot be kept or loaded: {wheel}/avx2-0123.so: file too short" in build.why_missing()
