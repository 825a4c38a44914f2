"""Arrays on the loopback: to the device and back, between devices and memories, and deleted ones."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

FLOAT8 = [np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e5m2")]
DTYPES = [
    np.dtype(name) for name in ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32")
]
DTYPES += [np.dtype(ml_dtypes.bfloat16), np.dtype("complex64"), *FLOAT8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_as_it_went(dtype):
    values = np.random.default_rng(0).integers(0, 2, (3, 5)).astype(dtype)
    there = jax.device_put(values)
    assert there.dtype == dtype
    assert there.devices() == {jax.devices()[0]}
    np.testing.assert_array_equal(np.asarray(there), values)


@pytest.mark.parametrize(
    "values",
    [
        np.float32(3.5),
        np.zeros((0, 4), np.int32),
        np.arange(24).reshape(4, 6)[::2, 1::2],
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
        np.broadcast_to(np.arange(3, dtype=np.float32), (4, 3)),
    ],
    ids=["scalar", "empty", "strided", "transposed", "broadcast"],
)
def test_every_shape_and_stride_comes_back_as_it_went(values):
    there = jax.device_put(values)
    assert there.shape == values.shape
    np.testing.assert_array_equal(np.asarray(there), values)


def test_the_device_has_a_copy_and_does_not_read_the_hosts_array_later():
    values = np.arange(1000, dtype=np.float32)
    there = jax.device_put(values)
    values[:] = -1
    np.testing.assert_array_equal(np.asarray(there), np.arange(1000))


def test_types_of_less_than_a_byte_are_refused():
    with pytest.raises(Exception, match="UNIMPLEMENTED"):
        jax.device_put(np.ones(4, ml_dtypes.int4)).block_until_ready()


def test_arrays_go_between_devices_memories_and_the_cpu():
    first, second = jax.devices()
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    there = jax.device_put(jax.device_put(values, first), second)
    assert there.devices() == {second}
    pinned = jax.device_put(there, jax.sharding.SingleDeviceSharding(second, memory_kind="pinned_host"))
    assert pinned.sharding.memory_kind == "pinned_host"
    on_cpu = jax.device_put(pinned, jax.devices("cpu")[0])
    assert on_cpu.devices() == {jax.devices("cpu")[0]}
    back = jax.device_put(on_cpu, first)
    for array in (there, pinned, on_cpu, back):
        np.testing.assert_array_equal(np.asarray(array), values)


def test_a_deleted_array_is_gone_and_its_memory_free():
    device = jax.devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    array = jax.device_put(np.ones(5000, np.float32))
    assert device.memory_stats()["bytes_in_use"] == before + 20_000
    array.delete()
    assert array.is_deleted()
    assert device.memory_stats()["bytes_in_use"] == before
    with pytest.raises(RuntimeError, match="deleted"):
        array + 1


def test_pinned_host_memory_does_not_count_as_the_devices():
    device = jax.devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    kept = jax.device_put(np.ones(5000, np.float32), pinned)
    assert device.memory_stats()["bytes_in_use"] == before
    assert float(jnp.sum(jax.device_put(kept, jax.sharding.SingleDeviceSharding(device)))) == 5000


def test_more_than_the_memory_is_refused_and_the_device_works_on():
    limit = jax.devices()[0].memory_stats()["bytes_limit"]
    with pytest.raises(Exception, match=rf"RESOURCE_EXHAUSTED: Out of memory on npu:0: .* takes {limit + 4} bytes"):
        jax.jit(lambda: jnp.zeros(limit // 4 + 1, jnp.float32))().block_until_ready()
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED"):
        jax.device_put(np.zeros(limit + 1, np.uint8)).block_until_ready()
    assert float(jnp.ones(3).sum()) == 3


def test_an_array_that_was_copied_can_still_be_donated():
    first, second = jax.devices()
    array = jax.device_put(np.ones(1000, np.float32), first)
    jax.device_put(array, second).block_until_ready()
    np.asarray(array)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
    assert array.is_deleted()
