"""The chosen implementation of paged attention and the reasons."""

import subprocess
import sys

import jax
import pytest

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.operator_settings import IMPLEMENTATION_NAMES
from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.devices.tuning import tuning
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.methods.eviction.h2o import H2O
from ksana_jax.methods.eviction.keydiff import KeyDiff
from ksana_jax.methods.eviction.keyformer import Keyformer
from ksana_jax.methods.eviction.snapkv import SnapKV
from ksana_jax.ops.implementations import IMPLEMENTATIONS, choose, explain
from ksana_jax.ops.kernel_limits import unsupported
from ksana_jax.ops.kernels import Kernels
from ksana_jax.ops.requirements import Requirements
from pallas_kernels.contract import Kernel, Result, check_options
from pallas_kernels.registry import KERNELS, KV_WRITES

H200 = Requirements("gpu", (9, 0), "bfloat16", 32, 8, 128, 64)
FEW, MANY, LATENT = (KERNELS[f"hopper_{name}"] for name in ("decode", "prefill", "latent"))
HOPPER = Kernels(FEW, FEW, MANY, KV_WRITES["hopper_kv_write"], LATENT)
TRITON = Kernels(KERNELS["triton_decode"], KERNELS["triton_ragged"])


def test_each_gpu_gets_its_kernels_and_everything_else_the_reference():
    assert choose(H200).name == "hopper"
    assert choose(H200._replace(compute_capability=(8, 0))).name == "triton"
    for other in ({"block_size": 8}, {"head_dim": 80}, {"dtype": "float32"}, {"compute_capability": (7, 0)}):
        assert choose(H200._replace(**other)).name == "xla", other
    assert choose(Requirements("tpu", None, "bfloat16", 4, 2, 64, 16)).name == "xla"


def test_latents_get_the_kernel_that_reads_them():
    latents = H200._replace(num_heads=16, num_kv_heads=1, head_dim=576, sides=1)
    assert choose(latents).name == choose(latents._replace(num_heads=128)).name == "hopper"
    codes = {"codec": "int8", "dtype": "int8", "query_dtype": "bfloat16"}
    others = [({"num_heads": 96}, "96 query heads"), ({"head_dim": 288}, "latents of 288 numbers")]
    others += [(codes, "read f32, bf16, f16, latent8"), ({"eviction": H2O()}, "does not support return_mass")]
    in_8_bits = codes | {"codec": "latent8"}
    assert choose(latents._replace(**in_8_bits)).name == "hopper"
    others += [(in_8_bits | {"head_dim": 544}, "latents of 512 codes in int8 with 4 scales and 32 rotated")]
    others += [(in_8_bits | {"query_dtype": "float16"}, "queries in float16")]
    for other, reason in others:
        assert choose(latents._replace(**other)).name == "xla"
        assert reason in str(unsupported(HOPPER, latents._replace(**other)))
    assert "latents, which are keys and values at once" in str(unsupported(TRITON, latents))


def test_pools_of_codes_get_kernels_that_read_their_codec():
    codes = H200._replace(dtype="int8", codec="int8", query_dtype="bfloat16")
    assert choose(codes).name == "hopper"
    assert choose(codes._replace(dtype="float8_e4m3fn", codec="fp8_e4m3", query_dtype="float16")).name == "hopper"
    for other in (
        {"query_dtype": "float32"},  # it would be rounded to 16 bits
        {"compute_capability": (8, 0)},
        {"codec": "my_module:Int8"},  # the same dtype, but who knows what it means
        {"dtype": "float8_e5m2", "codec": "fp8_e5m2"},
        {"dtype": "float16", "codec": "f16"},
    ):
        assert choose(codes._replace(**other)).name == "xla", other
    config = ModelConfig(num_heads=8, num_kv_heads=4, head_dim=64)
    layout = layout_of(config, dtype="int8", block_size=32)
    needs = Requirements.of(config, layout, query_dtype="bfloat16")
    assert (needs.codec, needs.dtype, needs.query_dtype) == ("int8", "int8", "bfloat16")


def test_what_an_implementation_lacks_is_said():
    reasons = {name: (used, why) for name, used, why in explain(H200._replace(block_size=8))}
    assert reasons["xla"] == (True, "preferred here")
    assert not reasons["hopper"][0] and "blocks of 8 tokens" in reasons["hopper"][1]
    reasons = {name: why for name, _, why in explain(Requirements("cpu", None, "uint16", 4, 2, 64, 16))}
    assert reasons["hopper"] == "needs an NVIDIA GPU of compute capability 9.0, this is cpu"


def test_one_that_does_not_serve_cannot_be_asked_for():
    assert choose(H200, "xla").name == "xla"
    with pytest.raises(ValueError, match=r"operators\.attention 'hopper': blocks of 8 tokens"):
        choose(H200._replace(block_size=8), "hopper")
    with pytest.raises(ValueError, match="'fast', must be auto or one of hopper, triton, native, xla"):
        choose(H200, "fast")


def test_kernels_that_lack_an_option_are_not_chosen_where_it_is_asked_for():
    def attend(call, work, *, tuning):
        check_options(call, "q_sink", "return_lse", "out_dtype")
        return Result(call.q)

    plain = Kernels(Kernel(attend, None), Kernel(attend, None))
    assert unsupported(plain, H200) is None
    assert unsupported(plain, H200._replace(soft_cap=True)) == "this kernel does not support soft_cap"
    assert unsupported(plain, H200._replace(sinks=True)) == "this kernel does not support sinks"
    # Kernels of this project have both.
    assert choose(H200._replace(soft_cap=True, sinks=True)).name == "hopper"
    observed = H200._replace(eviction=SnapKV())
    assert unsupported(plain, observed) == "this kernel does not support mass_factor, return_mass"
    assert choose(observed).name == "hopper"
    assert "Keyformer observes other weights" in str(unsupported(HOPPER, H200._replace(eviction=Keyformer())))
    unrotated = H200._replace(eviction=KeyDiff(positions="cache"))
    assert unsupported(HOPPER, unrotated) == "this kernel does not support key_rope"
    assert choose(unrotated).name == "triton"
    assert choose(unrotated._replace(eviction=H2O(positions="cache"))).name == "xla"  # none returns the weights
    assert choose(unrotated._replace(num_repositioned_sinks=2)).name == "triton"  # of layers that do not evict
    capped = ModelConfig(soft_cap=50.0, sinks="zero")
    needs = Requirements.of(
        capped, layout_of(capped, dtype="bf16", block_size=32, as_bits=tuning("cpu").stored_as_bits)
    )
    assert needs.soft_cap and needs.sinks


def test_a_layer_whose_heads_have_patterns_of_their_own_asks_for_one_kv_head_a_call():
    config = ModelConfig(num_layers=2, num_heads=32, num_kv_heads=8, head_dim=128)
    layout = layout_of(config, [FULL, AttentionPattern(window=64)] * 8, dtype="bf16", block_size=64)
    needs = Requirements.of(config, layout, query_dtype="bfloat16")
    assert (needs.num_heads, needs.num_kv_heads) == (4, 1)
    for capability, name in (((9, 0), "hopper"), ((8, 0), "triton")):
        assert choose(needs._replace(platform="gpu", compute_capability=capability)).name == name


def test_the_needs_of_a_model_are_those_of_this_device():
    config = ModelConfig(num_heads=8, num_kv_heads=4, head_dim=64)
    needs = Requirements.of(
        config, layout_of(config, dtype="bf16", block_size=32, as_bits=tuning("cpu").stored_as_bits)
    )
    assert needs.platform == jax.default_backend() and needs.block_size == 32 and needs.num_kv_heads == 4


def test_the_configuration_knows_the_names_that_there_are():
    assert tuple(i.name for i in IMPLEMENTATIONS) == IMPLEMENTATION_NAMES["attention"]


def test_a_machine_without_a_gpu_does_not_wait_for_pallas():
    code = "import sys; from ksana_jax import LLM; sys.exit('jax.experimental.pallas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
