"""The loopback: what it withholds from a plugin that others have built, and the engine on such a device."""

import re

import pytest

from ksana_jax.core.errors import ConfigError
from tests.devices.children import child, run_tests
from tests.loopback import openxla, setting, wrapper
from tests.machine import loopback_plugin


def test_where_there_is_no_plugin_one_sentence_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(openxla, "why_unusable", lambda: None)
    monkeypatch.setattr(openxla, "PATH", tmp_path / "none.so")
    missing = "the loopback wraps OpenXLA's CPU plugin: `make plugin` has not fetched it"
    monkeypatch.setattr(wrapper, "why_missing", wrapper.why_missing.__wrapped__)
    with pytest.raises(ConfigError, match=missing):
        wrapper.Loopback("npu")


@loopback_plugin
def test_memory_is_counted_limited_and_given_back():
    child(f"""
    use_device({setting(memory_bytes=2**20, pinned_host=True)})
    import jax, jax.numpy as jnp, numpy as np
    first, second = jax.devices()[:2]
    def used(device=first):
        return device.memory_stats()["bytes_in_use"]

    assert (first.platform, first.device_kind) == ("npu", "loopback npu (CPU)")
    assert "loopback" in first.client.platform_version and first.memory_stats()["bytes_limit"] == 2**20
    values = np.ones(5016, np.float32)
    values = values[-values.ctypes.data % 64 // 4 :][:5000]  # aligned, so that a CPU could read it where it is
    array = jax.device_put(values)
    values[:] = 2
    assert float(array.sum()) == 5000 and used() == 20_000
    there = jax.device_put(array, second)
    pinned = jax.device_put(array, jax.sharding.SingleDeviceSharding(first, memory_kind="pinned_host"))
    pinned.block_until_ready()
    assert (used(), used(second)) == (20_000, 20_000)
    # A donated array's memory is the result's; a deleted one's is free.
    pointer = array.unsafe_buffer_pointer()
    result = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted() and result.unsafe_buffer_pointer() == pointer and used() == 20_000
    there.delete()
    del result
    assert (used(), used(second)) == (0, 0)

    peak = first.memory_stats()["peak_bytes_in_use"]
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED: Out of memory on npu: an array takes 1048577 bytes"):
        jax.device_put(np.zeros(2**20 + 1, np.uint8)).block_until_ready()
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED: Out of memory on npu: a program takes 1048580 bytes"):
        jax.jit(lambda: jnp.zeros(2**18 + 1))()
    # Temporary buffers count while a program runs.
    sort = jax.jit(lambda x: jnp.sort(x)[:1] * jnp.sort(-x)[:1])
    assert used() == 0 and first.memory_stats()["peak_bytes_in_use"] == peak
    assert sort(np.ones(50_000, np.float32)).shape == (1,)
    assert first.memory_stats()["peak_bytes_in_use"] > 300_000
    """)


@loopback_plugin
def test_what_is_withheld_is_an_error_and_the_process_lives():
    child(f"""
    use_device({setting(lacks=["Buffer_CopyToMemory", "donation"], lacks_operations=["sort", "dynamic while"])})
    import threading
    import jax, jax.numpy as jnp, numpy as np
    assert [memory.kind for memory in jax.devices()[0].addressable_memories()] == ["device"]
    x = jnp.ones(8)
    with pytest.raises(Exception, match="UNIMPLEMENTED: failed to legalize operation 'stablehlo.sort'"):
        jnp.sort(x)
    with pytest.raises(Exception, match="failed to legalize operation 'dynamic while'"):
        jax.jit(lambda n: jax.lax.while_loop(lambda i: i * i < n, lambda i: i + 1, 0))(1000)
    assert float(jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: 2 * x, x))(x).sum()) == 64
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    with pytest.raises(Exception, match="UNIMPLEMENTED: PJRT_Buffer_CopyToMemory is not implemented by the loopback"):
        jax.device_put(x, jax.devices()[1]).block_until_ready()
    assert not np.array_equal(donating(x), x) and not x.is_deleted()
    unknown = jax.jit(lambda x: x + 1, compiler_options={{"xla_no_such_option": True}})
    for _ in range(3):  # the temporary argument is destroyed while the exception is pending
        with pytest.raises(Exception, match="xla_no_such_option"):
            unknown(jnp.ones(4) + 1)
    found = {{}}
    def work(n):
        found[n] = float(jax.jit(lambda x: jnp.sum(x) * n)(np.ones(n, np.float32)))
    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {{n: n * n for n in range(1, 9)}}
    """)


@loopback_plugin
def test_devices_compute_together_within_the_memory_of_each():
    child(f"""
    use_device({setting(memory_bytes=2**20)})
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    mesh = Mesh(np.array(jax.devices()[:2]), "d")
    rows = NamedSharding(mesh, P("d"))
    x = jax.device_put(np.ones((2, 200_000), np.float32), rows)
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(x)
    assert float(total) == 400_000
    assert [device.memory_stats()["bytes_in_use"] for device in jax.devices()[:3]] == [800_004, 800_004, 0]
    del x
    kept = jax.device_put(np.ones(200_000, np.float32), jax.devices()[1])  # where the second half would be
    ones = jax.jit(lambda: jnp.ones((2, 200_000)), out_shardings=rows)
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED: Out of memory on npu: a program takes 800000 bytes"):
        ones()
    del kept
    assert ones().shape == (2, 200_000)
    """)


@loopback_plugin
@pytest.mark.soak
def test_the_engine_computes_with_numbers_of_8_bits_that_are_stored_as_such():
    # Where the compiler does not say that it would convert a pool, numbers are stored as they are.
    lacks = ["Executable_GetCompiledMemoryStats"]
    output = run_tests(setting(lacks=lacks), "tests/engine/test_kv_codecs.py", "-k", "by_definition and fp8")
    assert re.search(r"^2 passed", output, re.M), output


@loopback_plugin
@pytest.mark.soak
def test_blocks_move_and_tokens_stay_where_a_device_has_memory_of_its_own():
    names = ("runner/test_movers.py", "engine/test_golden.py", "engine/test_kv_equivalence.py")
    output = run_tests(
        setting(pinned_host=True),
        *(f"tests/{name}" for name in names),
        *("-k", "not does_not_have"),
        timeout=1200,
        environment={"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    assert re.search(r"^[1-9][0-9]+ passed", output, re.M), output


@pytest.mark.parametrize(
    "options, message",
    [
        ({"memory": 2}, "the loopback plugin has no option 'memory'; it has memory_bytes, pinned_host"),
        ({"memory_bytes": 0}, "memory_bytes is 0, must be"),
        ({"lacks": ["Buffer_Dance"]}, "lacks has 'Buffer_Dance', which is no function of the PJRT"),
        ({"lacks_operations": "sort"}, "'sort' is not a list of names"),
    ],
)
def test_a_mistake_in_options_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        wrapper.LoopbackOptions.read(options)
