"""Attention to latents on Hopper, run by jax's interpreter of GPU programs on the CPU, against the reference."""

import dataclasses

import numpy as np
import pytest

from pallas_kernels.arguments import LATENTS, LATENTS_8_BITS, make
from pallas_kernels.contract import Pool
from pallas_kernels.registry import KERNELS
from tests.pallas_kernels.contract import ABSOLUTE, LSE, RELATIVE, check
from tests.pallas_kernels.interpreter import PARAMS, interpreting, several_warpgroups
from tests.soak import soak_unless

KERNEL = KERNELS["hopper_latent"].tuned(interpret=PARAMS)
SPECS, CODES = LATENTS[:4], LATENTS_8_BITS[:3]


@several_warpgroups
@pytest.mark.parametrize("spec", soak_unless(SPECS[0].__eq__, [*SPECS, *CODES]), ids=str)
def test_latents_equal_the_reference_without_races(spec):
    with interpreting():
        check(KERNEL.tuned(num_workers=3), spec)


@several_warpgroups
def test_latents_in_8_bits_equal_their_definition_in_float64_up_to_one_rounding():
    call, spec = make(CODES[0]), CODES[0]
    kv, scales, *_, rotated = call.pool
    assert scales is not None and rotated is not None
    with interpreting():
        out, lse, _ = KERNEL.tuned(num_workers=3)(call)
    for row, (length, _) in enumerate(spec.rows):
        blocks = np.asarray(call.tables)[row]
        codes, steps, r = (
            np.float64(x[blocks, spec.layer, 0, 0]).reshape(-1, x.shape[-1])[:length] for x in (kv, scales, rotated)
        )
        c = codes * np.repeat(steps, 128, axis=1)
        k = np.concatenate([r[:, :32], c[:, :256], r[:, 32:], c[:, 256:]], axis=1)
        q = np.float64(call.q[row, 0])
        s = q @ k.T
        p = np.exp(s - s.max(axis=1, keepdims=True))
        total = p.sum(axis=1)
        p /= total[:, None]
        # A product of a code and its scale is rounded to bfloat16, at most 2^-9 of it: scores, and with them the
        # log-sum-exp, are off by at most `off`, a weight by a factor of exp(2 off).
        off = 2.0**-9 * (np.abs(q) @ np.abs(k).T).max(axis=1)
        assert (np.abs(lse[row, 0] - s.max(axis=1) - np.log(total)) <= off + LSE).all()
        allowed = (np.expm1(2 * off)[:, None] + 2.0**-9 + RELATIVE[spec.dtype]) * (p @ np.abs(k)) + ABSOLUTE
        assert (np.abs(np.float64(out[row, 0]) - p @ k) <= allowed).all()


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
    call = make(CODES[0])
    kv, scales, *_, rotated = call.pool
    assert scales is not None and rotated is not None
    for pool, q, message in (
        (call.pool, call.q.astype("float16"), "queries in float16; with latents in 8 bits this kernel takes bfloat16"),
        (
            call.pool._replace(scales=scales[..., :1]),
            call.q,
            "latents of 512 codes in int8 with 1 scales and 64 rotated",
        ),
        (call.pool._replace(rotated=rotated.view("uint16")), call.q, "64 rotated numbers in uint16; this kernel takes"),
        (Pool(kv, scales[..., 0]), call.q[..., :512], "latents in int8; this kernel takes bfloat16, float16, int8 in"),
    ):
        assert message in (KERNEL.unsupported(call.replace(pool=pool, q=q)) or "")


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "hopper_latent"])
def test_other_kernels_refuse_latents(name):
    call = make(dataclasses.replace(SPECS[0], num_heads=8, head_dim=64))
    assert KERNELS[name].unsupported(call) == "this kernel does not support keys and values at once"
