"""What the engine finds out about a device, and what it does where something is missing; on the loopback."""

import jax
import pytest

from ksana_jax.devices.capabilities import capabilities, features, staging_memory, stored_as_bits
from ksana_jax.devices.features import ALL_FEATURES
from tests.devices.children import child
from tests.machine import loopback_plugin

# Before the code of a child.
LLM = """
import warnings
import numpy as np
from ksana_jax import LLM, SamplingParams
from ksana_jax.devices.capabilities import capabilities
from tests import loopback

def engine(*lacks, memory_bytes=2**28, **settings):
    options = {"lacks": list(lacks), "memory_bytes": memory_bytes}
    device = loopback.setting(**options) | settings.pop("device", {})
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


def test_what_a_cpu_has_is_known_without_trying():
    assert features(jax.devices()[0]) is features(jax.devices()[0])
    assert features(jax.devices()[0]) == ALL_FEATURES and not ALL_FEATURES.missing
    assert "bfloat16" in stored_as_bits(jax.devices()[0])


def test_a_device_may_be_asked_first_while_a_step_is_traced():
    child("""
    import jax, numpy as np
    from ksana_jax.devices.capabilities import capabilities
    found = []
    jax.jit(lambda x: found.append(capabilities()) or x + 1)(np.ones(3))
    assert found[0].shares_host_memory and found[0] is capabilities()
    """)


@loopback_plugin
def test_what_an_unknown_device_has_is_tried_once_and_also_while_a_step_is_traced():
    child("""
    use_device(loopback.setting(lacks_operations=["dynamic while", "xor"]))
    import jax, numpy as np
    from ksana_jax.devices.capabilities import features, stored_as_bits
    from ksana_jax.devices.features import Features
    found = []
    jax.jit(lambda x: found.append(features(jax.devices()[0])) or x + 1)(np.ones(3))
    assert found == [Features(dynamic_loops=False, branches=True, generator="rbg")]
    before = opened[-1].calls("Client_Compile")
    assert features(jax.devices()[0]) is found[0] and len(found[0].missing) == 2
    assert opened[-1].calls("Client_Compile") == before
    # XLA for CPUs beneath converts a pool of bfloat16, and none of float32.
    types = stored_as_bits(jax.devices()[0])
    compiled = jax.jit(lambda x, i: x.at[i].set(1), donate_argnums=0).lower(
        jax.ShapeDtypeStruct((1024, 64), "bfloat16"), jax.ShapeDtypeStruct((4,), "int32")).compile()
    converts = compiled.memory_analysis().temp_size_in_bytes >= 1024 * 64 * 2
    assert ("bfloat16" in types) == converts and "float32" not in types
    """)


@loopback_plugin
def test_what_the_setting_says_a_device_has_is_not_tried():
    child("""
    said = {"dynamic_loops": False, "generator": "rbg"}
    use_device(loopback.setting(lacks_operations=["case"]) | {"features": said})
    import jax
    from ksana_jax.devices.capabilities import features
    from ksana_jax.devices.features import Features
    assert features(jax.devices()[0]) == Features(dynamic_loops=False, branches=False, generator="rbg")
    assert opened[-1].calls("Client_Compile") == 1
    """)


@loopback_plugin
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


@loopback_plugin
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


@loopback_plugin
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


@loopback_plugin
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
