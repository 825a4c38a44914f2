"""Machines on which tests of C++ run: this one, and one that lacks AVX-512."""

import functools

import jax
import pytest

from ksana_jax.core import processor
from ksana_jax.native import build
from ksana_jax.native.target import target


@pytest.fixture(params=["this machine", "without AVX-512"])
def each_machine(request, monkeypatch):
    """Runs a test again with the library that a machine without AVX-512 compiles, and without the programs that jax has
    kept, which call the library that they were traced for."""
    if request.param == "without AVX-512":
        if not {"avx2", "fma", "avx512f"} <= processor.features():
            pytest.skip("this machine has no AVX-512 to hide, or no AVX2")
        monkeypatch.setenv("KSANA_HIDE", "avx512")
        monkeypatch.setattr(build, "_library", functools.cache(build._library.__wrapped__))
        forget()
        yield
        forget()
    else:
        yield


def forget() -> None:
    target.cache_clear()
    jax.clear_caches()
