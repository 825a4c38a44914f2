"""Devices by name or by bytes."""

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.runner.planner.devices import (
    DEVICES,
    GIB,
    MIB,
    available_bytes,
    find_device,
    physical_bytes,
    this_device,
)


def test_devices_are_found_by_name_whatever_its_case():
    assert find_device("a100-80g").memory_bytes == 80 * GIB
    assert find_device(" A100-40G ").memory_bytes == 40 * GIB
    assert find_device("h100").l2_bytes == 50 * MIB
    for name in ("h200", "h100", "a100-80g", "a100-40g", "v100-32g", "ascend-910b"):
        assert find_device(name) is DEVICES[name]


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [
        ("25769803776", 24 * GIB),
        (25769803776, 24 * GIB),
        ("24GiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("80 GB", 80 * 10**9),
        ("1.5KiB", 1536),
        ("512MiB", 512 * MIB),
        ("7b", 7),
        ("2TiB", 2048 * GIB),
    ],
)
def test_a_number_of_bytes_is_a_device(given, num_bytes):
    device = find_device(given)
    assert (device.memory_bytes, device.l2_bytes) == (num_bytes, None)


@pytest.mark.parametrize("given", ["foo", "", "24XB", "-1", "1e9", "24 GiB x", "ib", "GiB", "0", "0.2b", "nan"])
def test_anything_else_is_refused_in_one_line(given):
    with pytest.raises(ConfigError) as raised:
        find_device(given)
    assert repr(given) in str(raised.value) and "\n" not in str(raised.value)


def test_cpu_is_the_memory_of_this_machine():
    assert find_device("cpu").memory_bytes == physical_bytes() > 100 * MIB
    assert this_device() == find_device("cpu")
    assert available_bytes() > 10 * MIB
