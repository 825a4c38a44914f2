"""Runs tests on the loopback, in processes whose jax was started on it."""

import re

import pytest

from tests.devices.children import ROOT, run_tests

GIB = 2**30


def loopback(**options):
    return {"platform": "npu", "plugin": "loopback", "options": options}


def test_arrays_and_programs():
    output = run_tests(loopback(num_devices=2, memory_bytes=GIB, pinned_host=True), "tests/devices/on_loopback")
    assert re.search(r"^(4[0-9]|[5-9][0-9]) passed in", output, re.M), output


@pytest.mark.soak
def test_the_engine_computes_with_numbers_of_8_bits_that_are_stored_as_such():
    # Where the compiler does not say that it would convert a pool, numbers are stored as they are.
    lacks = ["Executable_GetCompiledMemoryStats"]
    output = run_tests(loopback(lacks=lacks), "tests/engine/test_kv_codecs.py", "-k", "by_definition and fp8")
    assert re.search(r"^2 passed", output, re.M), output


# Dealt out, so that they run in several processes at once.
ENGINE = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/engine").glob("test_*.py"))
FILES = {"blocks and sampling": ["tests/kv", "tests/sampling"]} | {f"engine {i}": ENGINE[i::4] for i in range(4)}


@pytest.mark.soak
@pytest.mark.parametrize("part", FILES)
def test_the_tests_of_blocks_sampling_and_the_engine(part):
    """What `pytest --device=loopback tests/kv tests/sampling tests/engine` runs; XLA optimises little."""
    output = run_tests(
        loopback(pinned_host=True), *FILES[part], timeout=1200, environment={"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    )
    assert re.search(r"^[1-9][0-9]+ passed", output, re.M), output


@pytest.mark.soak
def test_blocks_move_through_pinned_memory():
    output = run_tests(loopback(pinned_host=True), "tests/runner/test_movers.py", "-k", "not does_not_have")
    assert re.search(r"^[1-9][0-9]* passed", output, re.M), output
