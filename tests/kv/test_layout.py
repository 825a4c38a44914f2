"""The part of a pool on one of several devices that share it by kv head."""

import pytest

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.kv.layout import KVLayout, Leaf
from ksana_jax.kv.model_layout import layout_of

MODEL = ModelConfig(num_layers=4, num_heads=16, num_kv_heads=8, head_dim=32)
MIXED = (FULL, AttentionPattern(window=24)) * 2
LAYOUT = layout_of(MODEL, MIXED, dtype="bf16", block_size=16)
SCALED = KVLayout(LAYOUT.groups, 16, (LAYOUT.leaf("kv"), Leaf("scale", (2, 2, 8, 16), "float32")), "int8")
SEALED = layout_of(MODEL, MIXED, dtype="kivi2", block_size=16)


@pytest.mark.parametrize("layout", [LAYOUT, SCALED, SEALED], ids=["numbers", "codes and scales", "blocks of codes"])
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_each_device_holds_its_part_of_every_block(layout, num_devices):
    local = layout.local(num_devices)
    assert local.block_bytes * num_devices == layout.block_bytes
    assert local.token_bytes * num_devices == layout.token_bytes
    for part, whole in zip(local.leaves, layout.leaves, strict=True):
        assert part.shape[2] == 8 // num_devices
        assert part._replace(shape=()) == whole._replace(shape=())
    # Blocks, tables and what is freed are the same everywhere: one host half serves all devices.
    assert (local.groups, local.block_size, local.codec) == (layout.groups, layout.block_size, layout.codec)
    assert local.blocks_of(1000) == layout.blocks_of(1000) and local.table_width(1000) == layout.table_width(1000)


@pytest.mark.parametrize("num_devices", [3, 16, 0])
def test_heads_that_do_not_divide_are_refused(num_devices):
    with pytest.raises(ValueError, match=f"8 kv heads cannot be divided among {num_devices} devices"):
        LAYOUT.local(num_devices)
