"""A model is written as the config of its family, or refused if the family cannot express it."""

import dataclasses
import math
from typing import Any

import pytest

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.layer_spec import NO_ROPE, ExpertsSpec, IndexerSpec, LatentSpec, RopeConfig
from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.core.recurrent import DeltaRuleSpec, Mamba2Spec, ShortConvSpec
from ksana_jax.models.families import FAMILIES, config_from_hf, config_to_hf
from ksana_jax.models.families.mpt import alibi_slopes
from tests.models.hf_configs import ROPES

SLIDING = (FULL, AttentionPattern(window=9))
GEMMA_SHAPE = {
    "d_model": 64,
    "head_dim": 256,
    "norm": "rms_plus_one",
    "mlp": "geglu",
    "norm_placement": "both",
    "embed_scale": 8.0,
    "attention_scale": 144**-0.5,
    "tie_embeddings": True,
}
COHERE: Any = {"norm": "layer_no_bias", "norm_placement": "parallel_shared", "logit_scale": 0.25}
NEOX = {"norm": "layer", "mlp": "gelu", "qkv_bias": True, "out_bias": True, "mlp_bias": True}
EXPERTS = {"num_layers": 2, "mlp": "swiglu_experts", "experts": ExpertsSpec(8, 2)}
GATED: Any = {"num_layers": 3, "norm": "rms_plus_one", "qk_norm": "head", "out_gate": True}
GATED |= {"rope": RopeConfig(partial_rotary_factor=0.25), "recurrent": DeltaRuleSpec((0, 2), 2, 4, 8, 6, 3, eps=1e-5)}
MAMBA: Any = {
    "family": "granitemoehybrid",
    "num_layers": 3,
    "attention_scale": 0.0156,
    "recurrent": Mamba2Spec((0, 2), 2, 16, 8, 64, 3, False),
}
OSS: Any = {"family": "gpt_oss", "sinks": "learned", "mlp_bias": True, "num_layers": 2}
OSS |= {"mlp": "clamped_swiglu_experts", "experts": ExpertsSpec(8, 2, sigmoid_factor=1.3, limit=3.0)}
MOSAIC: Any = {"family": "mpt", "norm": "layer_no_bias", "mlp": "gelu", "rope": NO_ROPE, "alibi": alibi_slopes(8)}
MOSAIC |= {"d_ff": 2048}
TII: Any = {"family": "falcon", "norm": "layer", "mlp": "gelu"}
LATENT: Any = {"num_layers": 62, "num_kv_heads": 1, "head_dim": 32, "latent": LatentSpec(24, 8, 8, 10)}
PART, MSCALE = math.nextafter(0.25, 1), 0.1 * 0.7 * math.log(4) + 1
LATENT_ROPE = RopeConfig(partial_rotary_factor=PART)
LATENT_YARN = RopeConfig("yarn", 1e4, 4.0, 1024, mscale=1.0, mscale_all_dim=0.7, partial_rotary_factor=PART)
ROUTED: Any = {
    "mlp": "swiglu_experts",
    "d_ff": 32,
    "experts": ExpertsSpec(
        **{"num_experts": 8, "num_chosen": 2, "shared_d_ff": 32, "shared_gate": False, "factor": 2.5},
        **{"scoring": "sigmoid", "choice_bias": True, "num_groups": 4, "groups_chosen": 2, "groups_by": 2},
        **{"plain_layers": (0, 1, 2), "plain_d_ff": 40},
    ),
}
WRITABLE = [
    ModelConfig(vocab_size=64, num_layers=2, bos_id=3, eos_ids=(4, 5)),
    ModelConfig(num_layers=2, qkv_bias=True, out_bias=True, mlp_bias=True, tie_embeddings=True, rope=ROPES["yarn"][1]),
    ModelConfig(family="llama_sinks", num_layers=2, sinks="learned", qkv_bias=True, out_bias=True),
    ModelConfig(family="llama_sinks", num_layers=2, sinks="zero", tie_embeddings=True),
    ModelConfig(family="llama_cla", num_layers=4, kv_layers=(0, 0, 2, 0), qkv_bias=True, out_bias=True),
    ModelConfig(family="mistral", num_layers=2, pattern=AttentionPattern(window=9), rope=ROPES["linear"][1]),
    ModelConfig(family="mistral", num_layers=2, rope=ROPES["llama3"][1], max_position=8192),
    ModelConfig(family="ministral", num_layers=2, pattern=SLIDING, rope=ROPES["llama3"][1], max_position=8192),
    ModelConfig(family="ministral", num_layers=2),
    ModelConfig(family="ministral3", num_layers=2, pattern=AttentionPattern(window=9), rope=RopeConfig(theta=1e6)),
    ModelConfig(family="ministral3", num_layers=2, rope=RopeConfig("yarn", 1e6, 4.0, 1024, mscale=1.0)),
    ModelConfig(
        **LATENT
        | ROUTED
        | {"experts": ExpertsSpec(8, 2, shared_d_ff=32, shared_gate=False), "query_growth": (0.2, 1024)},
        **{"family": "mistral4", "attention_scale": 16**-0.5 * MSCALE**2, "rope": LATENT_YARN},
    ),
    ModelConfig(family="qwen2", num_layers=2, qkv_bias=True, pattern=SLIDING),
    ModelConfig(family="qwen3", num_layers=2, qk_norm="head", pattern=SLIDING[::-1]),
    ModelConfig(family="qwen3", num_layers=2, qk_norm="head", qkv_bias=True, out_bias=True, eos_ids=(7,)),
    ModelConfig(
        **GEMMA_SHAPE, family="gemma2", num_layers=2, pattern=SLIDING[::-1], soft_cap=50.0, logit_soft_cap=30.0
    ),
    ModelConfig(**GEMMA_SHAPE, family="gemma2", num_layers=2, qkv_bias=True, out_bias=True),
    ModelConfig(
        **GEMMA_SHAPE,
        family="gemma3_text",
        num_layers=2,
        pattern=SLIDING,
        qk_norm="head",
        rope=(RopeConfig("linear", 1e6, 8.0), RopeConfig(theta=1e4)),
    ),
    ModelConfig(**GEMMA_SHAPE, family="gemma3_text", num_layers=2, pattern=SLIDING[1], qk_norm="head"),
    ModelConfig(**GEMMA_SHAPE | {"norm_placement": "before", "attention_scale": None}, family="gemma"),
    ModelConfig(family="stablelm", norm="layer", rope=RopeConfig(partial_rotary_factor=0.25)),
    ModelConfig(family="stablelm", norm="layer", norm_placement="parallel_shared", qkv_bias=True),
    ModelConfig(**COHERE, family="cohere", rope=RopeConfig("linear", 5e5, 4.0)),
    ModelConfig(**COHERE, family="cohere2", num_layers=2, pattern=SLIDING, rope=(NO_ROPE, RopeConfig(theta=5e4))),
    ModelConfig(**COHERE | {"qkv_bias": True, "out_bias": True}, family="cohere2", rope=NO_ROPE),
    ModelConfig(family="olmo2", norm_placement="after", qk_norm="projection"),
    ModelConfig(family="olmo2", norm_placement="after", qk_norm="projection", qkv_bias=True, out_bias=True),
    ModelConfig(family="smollm3", num_layers=2, rope=(RopeConfig("none"), RopeConfig("linear", 2e6, 4.0))),
    ModelConfig(
        family="granite",
        qkv_bias=True,
        out_bias=True,
        **{"embed_scale": 12.0, "attention_scale": 0.0156, "residual_scale": 0.22, "logit_scale": 1 / 49},
    ),
    ModelConfig(family="glm4", norm_placement="both", rope=RopeConfig("llama3", 1e4, 8.0, 64)),
    ModelConfig(family="glm4", norm_placement="both", qkv_bias=True, rope=RopeConfig(partial_rotary_factor=0.5)),
    ModelConfig(
        family="phi3",
        rope=RopeConfig(
            "longrope", 1e4, 4.0, 64, factors=(2.0,) * 16, short_factors=(1.5,) * 16, partial_rotary_factor=0.5
        ),
    ),
    ModelConfig(family="phi3", pattern=AttentionPattern(window=9), tie_embeddings=True),
    ModelConfig(
        family="olmo3",
        norm_placement="after",
        qk_norm="projection",
        num_layers=2,
        pattern=SLIDING,
        rope=(RopeConfig("linear", 5e5, 4.0), RopeConfig(theta=5e5)),
    ),
    ModelConfig(family="olmo3", norm_placement="after", qk_norm="projection", rope=RopeConfig(theta=5e5)),
    ModelConfig(**NEOX, family="gpt_neox", norm_placement="parallel", rope=RopeConfig(partial_rotary_factor=0.25)),
    ModelConfig(
        **NEOX | {"qkv_bias": False, "out_bias": False, "mlp": "gelu_tanh"},
        family="gpt_neox",
        tie_embeddings=True,
        rope=RopeConfig("linear", 1e3, 4.0, partial_rotary_factor=0.5),
    ),
    ModelConfig(**NEOX | {"mlp": "relu"}, family="opt", rope=NO_ROPE, position_offset=2, tie_embeddings=True),
    ModelConfig(**NEOX | {"mlp": "gelu_tanh"}, family="gpt2", rope=NO_ROPE, position_offset=0, attention_scale=1.0),
    ModelConfig(**EXPERTS, family="mixtral", pattern=AttentionPattern(window=9)),
    ModelConfig(
        **EXPERTS,
        family="granitemoe",
        **{"embed_scale": 12.0, "attention_scale": 0.0156, "residual_scale": 0.22, "logit_scale": 1 / 49},
    ),
    ModelConfig(**EXPERTS, family="qwen3_moe", qk_norm="head", qkv_bias=True, out_bias=True),
    ModelConfig(**EXPERTS | {"experts": ExpertsSpec(4, 2, False)}, family="olmoe", qk_norm="projection"),
    ModelConfig(**EXPERTS | {"experts": ExpertsSpec(4, 2, False, 64)}, family="qwen2_moe", qkv_bias=True),
    ModelConfig(
        **EXPERTS | {"experts": ExpertsSpec(8, 2, plain_layers=(1,), plain_d_ff=40)}, family="qwen3_moe", qk_norm="head"
    ),
    ModelConfig(**EXPERTS | {"experts": ExpertsSpec(4, 4, True, 64)}, family="qwen2_moe", tie_embeddings=True),
    ModelConfig(**OSS, pattern=SLIDING[::-1], rope=RopeConfig("yarn", 1e4, 32.0, 64, truncate=False)),
    ModelConfig(**OSS, pattern=SLIDING, qkv_bias=True, out_bias=True, rope=RopeConfig(theta=5e3)),
    ModelConfig(**MOSAIC, tie_embeddings=True),
    ModelConfig(**MOSAIC | {"attention_scale": 0.3, "d_ff": 512}),
    ModelConfig(**TII, norm_placement="parallel_shared", num_kv_heads=1),
    ModelConfig(**TII, norm_placement="parallel_shared", num_kv_heads=2, tie_embeddings=True),
    ModelConfig(**TII, norm_placement="parallel", num_kv_heads=1, rope=RopeConfig("linear", 1e4, 2.0)),
    ModelConfig(
        **TII | {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
        norm_placement="before",
        rope=NO_ROPE,
        alibi=tuple(slope / 8 for slope in alibi_slopes(8)),
    ),
    ModelConfig(**LATENT, family="youtu", attention_scale=16**-0.5, rope=RopeConfig(partial_rotary_factor=PART)),
    ModelConfig(**LATENT | ROUTED, family="deepseek_v3", attention_scale=16**-0.5, rope=LATENT_ROPE),
    ModelConfig(
        **LATENT | ROUTED | {"latent": LatentSpec(24, 8, 8, 10, 12, indexer=IndexerSpec(4, 16, 100))},
        **{"family": "deepseek_v32", "attention_scale": 16**-0.5, "rope": LATENT_ROPE},
    ),
    ModelConfig(**LATENT | ROUTED, family="glm4_moe_lite", attention_scale=16**-0.5 * MSCALE**2, rope=LATENT_YARN),
    ModelConfig(
        **LATENT | ROUTED | {"experts": ExpertsSpec(8, 2, False, 64, num_groups=2, shared_gate=False, factor=16.0)},
        **{"family": "deepseek_v2", "attention_scale": 16**-0.5 * MSCALE**2, "rope": LATENT_YARN},
    ),
    ModelConfig(
        **LATENT | {"latent": LatentSpec(24, 8, 8, 10, 12, interleaved=False), "tie_embeddings": True},
        **{"family": "minicpm3", "attention_scale": 16**-0.5, "embed_scale": 12.0, "logit_scale": 0.25},
        residual_scale=1.4 / 62**0.5,
        rope=RopeConfig(
            "longrope", 1e4, 4.0, 64, factors=(2.0,) * 4, short_factors=(1.5,) * 4, partial_rotary_factor=PART
        ),
    ),
    ModelConfig(family="smollm3", num_layers=2, rope=RopeConfig("none"), tie_embeddings=True, mlp_bias=True),
    ModelConfig(
        **{"family": "olmo_hybrid", "num_layers": 3, "rope": NO_ROPE, "norm_placement": "after"},
        qk_norm="projection",
        recurrent=DeltaRuleSpec((0, 2), 2, 4, 8, 6, 3, 2.0, norm_placement="before"),
    ),
    ModelConfig(**GATED, family="qwen3_5_text", tie_embeddings=True),
    ModelConfig(**EXPERTS | GATED | {"experts": ExpertsSpec(4, 2, True, 64)}, family="qwen3_5_moe_text"),
    ModelConfig(
        **EXPERTS | GATED | {"experts": ExpertsSpec(4, 2, False, 64, plain_layers=(1,), plain_d_ff=40)},
        family="qwen3_next",
    ),
    ModelConfig(**MAMBA, rope=NO_ROPE, tie_embeddings=True, embed_scale=12.0, residual_scale=0.22),
    ModelConfig(**EXPERTS | {"experts": ExpertsSpec(8, 2, shared_d_ff=64, shared_gate=False)} | MAMBA),
    ModelConfig(
        **LATENT | ROUTED | {"num_layers": 3, "family": "kimi_linear", "attention_scale": 0.25, "rope": NO_ROPE},
        recurrent=DeltaRuleSpec((0, 2), 4, 4, 8, 8, 3, rank=8),
    ),
    ModelConfig(family="lfm2", num_layers=3, recurrent=ShortConvSpec((0, 2), 4, bias=True), qk_norm="head"),
]


@pytest.mark.parametrize("config", WRITABLE, ids=[f"{c.family}-{i}" for i, c in enumerate(WRITABLE)])
def test_written_config_reads_back_as_the_same_model(config):
    if config.layers[0].attention.rope.kind == "yarn":
        config = dataclasses.replace(config, max_position=4096)
    assert config_from_hf(config_to_hf(config)) == config
    assert {case.family for case in WRITABLE} == set(FAMILIES)


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"pattern": AttentionPattern(window=9)}, "pattern window=9"),
        ({"qk_norm": "head"}, "qk_norm head"),
        ({"norm_placement": "after"}, "norm_placement after"),
        ({"family": "olmo2", "norm_placement": "after", "qk_norm": "head"}, "qk_norm head"),
        ({"norm_placement": "parallel"}, "norm_placement parallel"),
        (EXPERTS, "experts ExpertsSpec"),
        ({"family": "mixtral", "mlp": "swiglu_experts"}, "experts None"),
        ({"family": "mixtral", **EXPERTS, "experts": ExpertsSpec(8, 2, False)}, "normalised=False"),
        ({"family": "olmoe", **EXPERTS, "experts": ExpertsSpec(8, 2, shared_d_ff=8)}, "shared_d_ff=8"),
        ({**OSS, "sinks": None}, "sinks None"),
        ({**OSS, "mlp_bias": False}, "mlp_bias False"),
        ({**OSS, "experts": ExpertsSpec(8, 2, False, limit=3.0)}, "normalised=False"),
        ({"family": "mixtral", **EXPERTS, "experts": ExpertsSpec(8, 2, limit=3.0)}, "limit=3.0"),
        ({"family": "gpt_neox", **NEOX, "num_kv_heads": 2}, "num_kv_heads 2"),
        ({"position_offset": 0}, "position_offset 0"),
        ({"family": "opt", **NEOX, "mlp": "relu", "rope": NO_ROPE, "position_offset": 0}, "position_offset 0"),
        ({**MOSAIC, "alibi": (0.5,) * 8}, "alibi"),
        ({**MOSAIC, "d_ff": 2000}, "d_ff 2000"),
        ({"alibi": (0.5,) * 8}, "alibi"),
        ({**TII, "norm_placement": "before", "num_kv_heads": 4}, "parallel_attn is False"),
        ({"sinks": "zero"}, "sinks zero"),
        ({"family": "llama_sinks"}, "attention_sinks is None"),
        ({"kv_layers": (0, 0)}, "kv_layers (0, 0)"),
        ({"family": "llama_cla"}, "kv_layers None"),
        ({"qkv_bias": True}, "out_bias False"),
        ({"family": "mistral", "pattern": AttentionPattern(window=9, num_sinks=1)}, "pattern"),
        ({"family": "mistral", "mlp_bias": True}, "mlp_bias True"),
        ({"family": "qwen2"}, "qkv_bias False"),
        (
            {"family": "qwen2", "qkv_bias": True, "pattern": (AttentionPattern(window=8), AttentionPattern(window=9))},
            "pattern",
        ),
        ({"rope": RopeConfig("dynamic", factor=2.0, original_max_len=9)}, "rope"),
        ({"family": "gptj"}, "'gptj'"),
        ({"mlp": "geglu"}, "mlp geglu"),
        ({"soft_cap": 5.0}, "soft_cap 5.0"),
        ({"residual_scale": 0.3}, "residual_scale 0.3"),
        ({"logit_scale": 0.3}, "logit_scale 0.3"),
        ({"attention_scale": 0.3}, "attention_scale 0.3"),
        ({"rope": RopeConfig(partial_rotary_factor=0.5)}, "rope"),
        ({"rope": (RopeConfig(), RopeConfig(theta=5.0))}, "rope"),
        (LATENT, "latent LatentSpec"),
        ({"recurrent": ShortConvSpec((0,))}, "recurrent ShortConvSpec"),
        ({**LATENT, "family": "youtu", "rope": LATENT_ROPE}, "attention_scale"),
        ({**LATENT, "family": "youtu", "num_layers": 2, "latent": None, "rope": LATENT_ROPE}, "latent None"),
        (
            {**LATENT, "family": "youtu", "latent": LatentSpec(24, 8, 8, 10, eps=1e-5), "attention_scale": 0.25},
            "latent LatentSpec",
        ),
    ],
)
def test_model_that_its_family_cannot_express_is_not_written(change, lost):
    with pytest.raises(ConfigError) as refusal:
        config_to_hf(dataclasses.replace(ModelConfig(num_layers=2), **change))
    assert lost in str(refusal.value)
