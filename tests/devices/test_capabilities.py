"""What the engine finds out about a device, and what it does where something is missing; on the loopback."""

import pytest

from ksana_jax.devices.capabilities import capabilities, staging_memory
from tests.devices.children import child

# Before the code of a child.
LLM = """
import warnings
import numpy as np
from ksana_jax import LLM, SamplingParams
from ksana_jax.devices.capabilities import capabilities

def engine(lacks="", memory_bytes=2**28, **settings):
    options = {"lacks": lacks, "memory_bytes": memory_bytes}
    device = {"platform": "npu", "plugin": "loopback", "options": options, **settings.pop("device", {})}
    settings = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 32, **settings}
    return LLM("ksana-tiny", device=device, **settings)

def tokens(llm):
    [output] = llm.generate("def main(", SamplingParams(temperature=0, max_tokens=8))
    return output.outputs[0].token_ids
"""
# Of "def main(", on the CPU.
EXPECTED = [266, 946, 504, 409, 283, 3, 262, 390]


def test_a_cpu_computes_on_the_hosts_memory():
    found = capabilities()
    assert found.shares_host_memory and found.donates and found.sizes_programs
    assert (found.platform, found.staging, found.memory_bytes) == ("cpu", "none", None)


def test_blocks_cross_pinned_memory_where_a_device_apart_from_the_host_has_it():
    assert staging_memory({"device", "pinned_host"}, False) == "pinned_host"
    assert staging_memory({"device"}, False) == "none"
    assert staging_memory({"device", "pinned_host"}, True) == "none"


@pytest.mark.soak
def test_a_pool_sized_by_the_devices_memory_fits_and_says_what_it_takes():
    child(
        f"""
    llm = engine(memory_fraction=0.9, enable_prefix_caching=True)
    found = capabilities()
    assert found.donates and found.sizes_programs and not found.shares_host_memory
    assert found.memory_bytes == 2**28
    assert tokens(llm) == {EXPECTED}
    assert llm.memory_usage()["step"].measured > 0
    import jax
    stats = jax.devices()[0].memory_stats()
    assert 0.6 * 2**28 < stats["peak_bytes_in_use"] <= 0.9 * 2**28, stats
    """,
        LLM,
    )


@pytest.mark.soak
def test_without_donation_the_pool_is_planned_twice():
    child(
        f"""
    warnings.filterwarnings("ignore", "(Some d|D)onat", UserWarning)
    llm = engine("donation", memory_fraction=0.9, enable_prefix_caching=True)
    assert not capabilities().donates
    assert llm.memory_plan.pool_copies == 2
    assert llm.memory_plan.pool_bytes < 0.45 * 2**28
    assert tokens(llm) == {EXPECTED}
    import jax
    assert jax.devices()[0].memory_stats()["peak_bytes_in_use"] <= 0.9 * 2**28
    """,
        LLM,
    )


@pytest.mark.soak
def test_a_device_that_does_not_say_its_memory_is_told_it():
    child(
        f"""
    with pytest.raises(ValueError, match="does not report its memory: give it as device.memory_bytes"):
        engine("Device_MemoryStats", memory_fraction=0.9)
    assert tokens(engine("Device_MemoryStats", num_blocks=64)) == {EXPECTED}
    """,
        LLM,
    )
    child(
        """
    told = {"memory_bytes": 2**28}
    llm = engine("Device_MemoryStats", memory_fraction=0.5, enable_prefix_caching=True, device=told)
    assert 0.3 * 2**28 < llm.memory_plan.pool_bytes < 0.5 * 2**28
    assert llm.memory_usage()["peak"].measured is None
    """,
        LLM,
    )


@pytest.mark.soak
def test_a_compiler_that_does_not_size_programs_leaves_num_blocks():
    child(
        f"""
    with pytest.raises(ValueError, match="the compiler of npu does not say how much memory a step takes: give"):
        engine("Executable_GetCompiledMemoryStats", memory_fraction=0.9)
    llm = engine("Executable_GetCompiledMemoryStats", num_blocks=64)
    assert tokens(llm) == {EXPECTED}
    assert llm.memory_usage()["step"].measured is None
    """,
        LLM,
    )
