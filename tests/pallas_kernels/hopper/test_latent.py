"""Attention to latents on Hopper, run by jax's interpreter of GPU programs on the CPU, against the reference."""

import dataclasses

import pytest

from pallas_kernels.arguments import LATENTS, make
from pallas_kernels.registry import KERNELS
from tests.pallas_kernels.contract import check
from tests.pallas_kernels.interpreter import PARAMS, interpreting, several_warpgroups
from tests.soak import soak_unless

KERNEL = KERNELS["hopper_latent"].tuned(interpret=PARAMS)
SPECS = LATENTS[:4]


@several_warpgroups
@pytest.mark.parametrize("spec", soak_unless(SPECS[0].__eq__, SPECS), ids=str)
def test_latents_equal_the_reference_without_races(spec):
    with interpreting():
        check(KERNEL.tuned(num_workers=3), spec)


def test_what_the_kernel_lacks_is_named():
    for changes, message in (
        ({"head_dim": 288}, "latents of 288 numbers; this kernel takes multiples of 64 from 128 to 576"),
        ({"head_dim": 640}, "latents of 640 numbers"),
        ({"num_heads": 96}, "96 query heads; with latents this kernel takes up to 64, or 128"),
        ({"dtype": "float32"}, "latents in float32"),
        ({"block_size": 8}, "blocks of 8 tokens"),
        ({"soft_cap": 30.0}, "does not support soft_cap"),
        ({"sides": 2}, "1 kv heads of keys and values; this kernel takes one, of latents"),
    ):
        assert message in (KERNEL.unsupported(make(dataclasses.replace(SPECS[0], **changes))) or "")


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "hopper_latent"])
def test_other_kernels_refuse_latents(name):
    call = make(dataclasses.replace(SPECS[0], num_heads=8, head_dim=64))
    assert KERNELS[name].unsupported(call) == "this kernel does not support keys and values at once"
