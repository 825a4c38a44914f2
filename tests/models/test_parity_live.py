"""Parity with transformers itself, on texts that are not in the golden files; where torch is installed."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from ksana_jax import LLM, PoolingParams
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import NO_ROPE, ExpertsSpec, IndexerSpec, LatentSpec, RopeConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.core.recurrent import DeltaRuleSpec, Mamba2Spec, ShortConvSpec
from ksana_jax.loading import export_hf, load_model
from ksana_jax.models.dense import dense_logits
from ksana_jax.models.families.mpt import alibi_slopes
from ksana_jax.models.frequencies import layer_ropes
from ksana_jax.models.params import init_params
from tests.golden.cases import golden_cases

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend
CASES = list(golden_cases())
ATOL = 1e-4
compiled_logits = jax.jit(dense_logits, static_argnames="config")


def theirs(model_dir, tokens: np.ndarray) -> np.ndarray:
    # transformers 5.24.0 lists no language model for Mistral 4.
    kind = "Mistral4ForCausalLM" if "mistral4" in (model_dir / "config.json").read_text() else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor(tokens)[None]).logits[0], -1).numpy()


def ours(model_dir, tokens: np.ndarray) -> np.ndarray:
    config, params = load_model(model_dir)
    return np.asarray(jax.nn.log_softmax(compiled_logits(params, tokens, config=config)))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_log_probabilities_of_another_text_are_those_of_transformers(case):
    tokens = np.random.default_rng(7).integers(0, 128, 61).astype(np.int32)
    np.testing.assert_allclose(ours(case.model_dir, tokens), theirs(case.model_dir, tokens), atol=ATOL, rtol=0)


@pytest.mark.parametrize("case", CASES[::8], ids=[case.name for case in CASES[::8]])
def test_embeddings_are_the_last_hidden_states_of_transformers(case):
    tokens = np.random.default_rng(8).integers(0, 128, 61).astype(np.int32)
    model = transformers.AutoModel.from_pretrained(case.model_dir, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(torch.tensor(tokens)[None]).last_hidden_state[0].numpy()
    llm = LLM(case.model_dir, max_model_len=128, max_num_batched_tokens=32, max_num_seqs=2, num_blocks=16)
    for kind, expected in (("LAST", hidden[-1]), ("MEAN", hidden.mean(0))):
        [found] = llm.embed(tokens, pooling_params=PoolingParams(pooling_type=kind, use_activation=False))
        np.testing.assert_allclose(found.outputs.embedding, expected, atol=ATOL, rtol=0)


TINY = ModelConfig(
    vocab_size=64,
    d_model=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    d_ff=48,
    max_position=128,
    bos_id=1,
    eos_ids=(2, 3),
)
SLIDING = (AttentionPattern(), AttentionPattern(window=9), AttentionPattern(window=9))
GEMMA = dataclasses.replace(
    TINY,
    norm="rms_plus_one",
    mlp="geglu",
    norm_placement="both",
    embed_scale=32**0.5,
    attention_scale=24**-0.5,
    tie_embeddings=True,
    pattern=SLIDING,
)
NEOX = dataclasses.replace(
    TINY,
    family="gpt_neox",
    num_kv_heads=4,
    head_dim=8,
    norm="layer",
    mlp="gelu",
    **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
)
PLAIN_GEMMA = {"norm_placement": "before", "attention_scale": None, "pattern": AttentionPattern()}
COHERE = dataclasses.replace(
    TINY, head_dim=8, norm="layer_no_bias", norm_placement="parallel_shared", logit_scale=0.4, tie_embeddings=True
)
EXPERTS = {"mlp": "swiglu_experts", "experts": ExpertsSpec(6, 2)}
FALCON = dataclasses.replace(TINY, family="falcon", head_dim=8, norm="layer", mlp="gelu")
LATENT = dataclasses.replace(
    TINY,
    **{"num_kv_heads": 1, "head_dim": 32, "latent": LatentSpec(24, 8, 8, 10)},
    rope=RopeConfig(partial_rotary_factor=math.nextafter(0.25, 1)),
)
GATED = dataclasses.replace(
    TINY,
    **{"norm": "rms_plus_one", "qk_norm": "head", "out_gate": True, "norm_eps": 0.01},
    rope=RopeConfig(partial_rotary_factor=0.5),
    recurrent=DeltaRuleSpec((0, 2), 2, 4, 8, 6, eps=0.01),
)
MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.7}
MSCALE = 0.1 * 0.7 * math.log(4) + 1
SIGMOID = ExpertsSpec(
    **{"num_experts": 8, "num_chosen": 2, "shared_d_ff": 24, "shared_gate": False, "factor": 2.5},
    **{"scoring": "sigmoid", "choice_bias": True, "num_groups": 4, "groups_chosen": 2, "groups_by": 2},
    **{"plain_layers": (0,), "plain_d_ff": 40},
)
EXPORTED = {
    "llama": TINY,
    "llama, biases": dataclasses.replace(TINY, qkv_bias=True, out_bias=True, mlp_bias=True),
    "llama, llama3 rope": dataclasses.replace(TINY, rope=RopeConfig("llama3", 5e5, 8.0, 32)),
    "llama, yarn": dataclasses.replace(TINY, rope=RopeConfig("yarn", 1e4, 4.0, 32, truncate=False)),
    "llama, linear": dataclasses.replace(TINY, rope=RopeConfig("linear", 1e4, 4.0)),
    "mistral": dataclasses.replace(TINY, family="mistral", pattern=AttentionPattern(window=9)),
    "ministral": dataclasses.replace(TINY, family="ministral", pattern=SLIDING),
    "ministral3": dataclasses.replace(
        TINY,
        family="ministral3",
        query_growth=(0.3, 20),
        rope=RopeConfig("yarn", 1e4, 4.0, 20, mscale=1.0, mscale_all_dim=1.0),
    ),
    "qwen2": dataclasses.replace(TINY, family="qwen2", qkv_bias=True, tie_embeddings=True, pattern=SLIDING),
    "qwen3": dataclasses.replace(TINY, family="qwen3", qk_norm="head", pattern=SLIDING),
    "olmo2": dataclasses.replace(TINY, family="olmo2", norm_placement="after", qk_norm="projection"),
    "smollm3": dataclasses.replace(TINY, family="smollm3", rope=(RopeConfig(), RopeConfig("none"), RopeConfig())),
    "olmo3": dataclasses.replace(
        TINY,
        family="olmo3",
        norm_placement="after",
        qk_norm="projection",
        pattern=SLIDING,
        rope=(RopeConfig("yarn", 5e5, 4.0, 32), RopeConfig(theta=5e5), RopeConfig(theta=5e5)),
    ),
    "phi3": dataclasses.replace(TINY, family="phi3", head_dim=8, pattern=AttentionPattern(window=9)),
    "phi3, long": dataclasses.replace(
        TINY,
        family="phi3",
        head_dim=8,
        rope=RopeConfig(
            "longrope", 1e2, 4.0, 32, factors=(1.0, 2.0, 4.0), short_factors=(1.0,) * 3, partial_rotary_factor=0.75
        ),
    ),
    "glm4": dataclasses.replace(
        TINY,
        family="glm4",
        norm_placement="both",
        qkv_bias=True,
        rope=RopeConfig("yarn", 1e4, 4.0, 32, partial_rotary_factor=0.5),
    ),
    "granite": dataclasses.replace(
        TINY, family="granite", embed_scale=6.0, attention_scale=0.1, residual_scale=0.4, logit_scale=0.25
    ),
    "gpt_neox": dataclasses.replace(
        NEOX, norm_placement="parallel", rope=RopeConfig("linear", 1e3, 4.0, partial_rotary_factor=0.5)
    ),
    "gpt_neox, one part after the other": dataclasses.replace(NEOX, mlp="gelu_tanh", tie_embeddings=True),
    "opt": dataclasses.replace(NEOX, family="opt", mlp="relu", rope=NO_ROPE, position_offset=2),
    "gpt2": dataclasses.replace(
        NEOX, family="gpt2", mlp="gelu_tanh", rope=NO_ROPE, position_offset=0, attention_scale=1.0, tie_embeddings=True
    ),
    "gemma": dataclasses.replace(GEMMA, **PLAIN_GEMMA, family="gemma"),
    "stablelm": dataclasses.replace(
        TINY, family="stablelm", head_dim=8, norm="layer", qkv_bias=True, rope=RopeConfig(partial_rotary_factor=0.5)
    ),
    "stablelm, one norm": dataclasses.replace(
        TINY, family="stablelm", head_dim=8, norm="layer", norm_placement="parallel_shared"
    ),
    "cohere": dataclasses.replace(COHERE, family="cohere", rope=RopeConfig("linear", 1e3, 4.0)),
    "cohere2": dataclasses.replace(COHERE, family="cohere2", pattern=SLIDING, rope=(NO_ROPE, *[RopeConfig()] * 2)),
    "mixtral": dataclasses.replace(TINY, **EXPERTS, family="mixtral", pattern=AttentionPattern(window=9)),
    "granitemoe": dataclasses.replace(
        TINY,
        **EXPERTS,
        family="granitemoe",
        head_dim=8,
        **{"embed_scale": 6.0, "attention_scale": 0.1, "residual_scale": 0.4, "logit_scale": 0.25},
    ),
    "qwen3_moe": dataclasses.replace(TINY, **EXPERTS, family="qwen3_moe", qk_norm="head"),
    "qwen3_moe, experts in one layer": dataclasses.replace(
        TINY,
        **{"mlp": "swiglu_experts", "family": "qwen3_moe", "qk_norm": "head"},
        experts=ExpertsSpec(6, 2, plain_layers=(0, 2), plain_d_ff=40),
    ),
    "olmoe": dataclasses.replace(
        TINY, **EXPERTS | {"experts": ExpertsSpec(5, 2, False)}, family="olmoe", head_dim=8, qk_norm="projection"
    ),
    "qwen2_moe": dataclasses.replace(
        TINY,
        **EXPERTS | {"experts": ExpertsSpec(5, 2, shared_d_ff=24)},
        family="qwen2_moe",
        head_dim=8,
        qkv_bias=True,
    ),
    "gpt_oss": dataclasses.replace(
        TINY,
        **{"family": "gpt_oss", "sinks": "learned", "mlp": "clamped_swiglu_experts", "pattern": SLIDING[::-1]},
        experts=ExpertsSpec(6, 3, sigmoid_factor=1.3, limit=1.0),
        rope=RopeConfig("yarn", 1e4, 4.0, 32, truncate=False),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
    ),
    "youtu": dataclasses.replace(LATENT, family="youtu", attention_scale=16**-0.5, tie_embeddings=True),
    "minicpm3": dataclasses.replace(
        LATENT,
        **{"family": "minicpm3", "latent": LatentSpec(24, 8, 8, 10, 12, interleaved=False), "attention_scale": 0.25},
        **{"embed_scale": 3.0, "residual_scale": 1.2 / 3**0.5, "logit_scale": 0.25},
    ),
    "deepseek_v2": dataclasses.replace(
        LATENT,
        **{"family": "deepseek_v2", "mlp": "swiglu_experts", "d_ff": 12, "attention_scale": 0.25 * MSCALE**2},
        experts=ExpertsSpec(8, 2, False, 24, num_groups=4, groups_chosen=2, shared_gate=False, factor=4.0),
        rope=dataclasses.replace(LATENT.rope, kind="yarn", factor=4.0, original_max_len=32, **MSCALES),
    ),
    "deepseek_v3": dataclasses.replace(
        LATENT,
        **{"family": "deepseek_v3", "mlp": "swiglu_experts", "d_ff": 12, "experts": SIGMOID, "attention_scale": 0.25},
    ),
    "deepseek_v32": dataclasses.replace(
        LATENT,
        **{"family": "deepseek_v32", "mlp": "swiglu_experts", "d_ff": 12, "experts": SIGMOID, "attention_scale": 0.25},
        latent=LatentSpec(24, 8, 8, 10, 12, indexer=IndexerSpec(16, 12, 20)),
    ),
    "mistral4": dataclasses.replace(
        LATENT,
        **{"family": "mistral4", "mlp": "swiglu_experts", "d_ff": 12, "attention_scale": 0.25 * MSCALE**2},
        experts=dataclasses.replace(SIGMOID, scoring="softmax", choice_bias=False),
        rope=dataclasses.replace(LATENT.rope, kind="yarn", factor=4.0, original_max_len=32, **MSCALES),
        query_growth=(0.3, 32),
    ),
    "glm4_moe_lite": dataclasses.replace(
        LATENT,
        **{"family": "glm4_moe_lite", "mlp": "swiglu_experts", "d_ff": 12, "attention_scale": 0.25},
        experts=dataclasses.replace(SIGMOID, plain_layers=(0, 2), num_groups=1, groups_chosen=1, groups_by=1),
    ),
    "olmo_hybrid": dataclasses.replace(
        TINY,
        **{"family": "olmo_hybrid", "head_dim": 8, "qk_norm": "projection", "norm_placement": "after"},
        recurrent=DeltaRuleSpec((0, 2), 2, 4, 8, 6, beta_factor=2.0, norm_placement="before"),
    ),
    "qwen3_next": dataclasses.replace(
        GATED,
        **{"family": "qwen3_next", "mlp": "swiglu_experts"},
        experts=ExpertsSpec(6, 2, shared_d_ff=24, plain_layers=(0,), plain_d_ff=40),
    ),
    "qwen3_5": dataclasses.replace(GATED, family="qwen3_5_text", tie_embeddings=True),
    "qwen3_5_moe": dataclasses.replace(
        GATED, family="qwen3_5_moe_text", mlp="swiglu_experts", experts=ExpertsSpec(6, 2, shared_d_ff=24)
    ),
    "granitemoehybrid": dataclasses.replace(
        TINY,
        **EXPERTS | {"experts": ExpertsSpec(6, 2, shared_d_ff=24, shared_gate=False), "norm_eps": 0.01},
        **{"family": "granitemoehybrid", "head_dim": 8, "rope": NO_ROPE, "logit_scale": 0.25},
        recurrent=Mamba2Spec((0, 2), 2, 8, 6, 8, bias=False, eps=0.01),
    ),
    "kimi_linear": dataclasses.replace(
        LATENT,
        **{"family": "kimi_linear", "mlp": "swiglu_experts", "d_ff": 12, "experts": SIGMOID, "attention_scale": 0.25},
        rope=NO_ROPE,
        recurrent=DeltaRuleSpec((0, 2), 4, 4, 6, 6, rank=6),
    ),
    "lfm2": dataclasses.replace(
        TINY, family="lfm2", head_dim=8, qk_norm="head", recurrent=ShortConvSpec((0, 2), 4, bias=True)
    ),
    "mpt": dataclasses.replace(
        TINY,
        **{"family": "mpt", "num_kv_heads": 4, "head_dim": 8, "norm": "layer_no_bias", "mlp": "gelu", "d_ff": 128},
        **{"rope": NO_ROPE, "alibi": alibi_slopes(4)},
    ),
    "falcon, one norm": dataclasses.replace(FALCON, norm_placement="parallel_shared"),
    "falcon, two norms": dataclasses.replace(FALCON, norm_placement="parallel", num_kv_heads=1, mlp="gelu_tanh"),
    "falcon, alibi": dataclasses.replace(
        FALCON,
        **{"norm_placement": "before", "num_kv_heads": 4, "rope": NO_ROPE, "tie_embeddings": True},
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
        alibi=tuple(slope * 8**-0.5 for slope in alibi_slopes(4)),
    ),
    "gemma2": dataclasses.replace(GEMMA, family="gemma2", soft_cap=2.0, logit_soft_cap=9.0),
    "gemma3": dataclasses.replace(
        GEMMA,
        family="gemma3_text",
        qk_norm="head",
        rope=(RopeConfig("linear", 1e6, 8.0), RopeConfig(theta=1e2), RopeConfig(theta=1e2)),
    ),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_transformers_reads_what_we_export(name, tmp_path):
    config = EXPORTED[name]
    export_hf(tmp_path, config, init_params(config, std=0.3))
    tokens = np.random.default_rng(7).integers(0, 64, 61).astype(np.int32)
    np.testing.assert_allclose(ours(tmp_path, tokens), theirs(tmp_path, tokens), atol=ATOL, rtol=0)
    generation = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert (generation.bos_token_id, generation.eos_token_id) == (1, [2, 3])


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=1e6),
        RopeConfig("llama3", 5e5, 8.0, 8192),
        RopeConfig("llama3", 5e5, 32.0, 8192),
        RopeConfig("yarn", 1e6, 4.0, 32768),
        RopeConfig("yarn", 1e4, 16.0, 4096, beta_fast=16.0, beta_slow=2.0, mscale=1.0, mscale_all_dim=0.8),
        RopeConfig("linear", 1e4, 8.0),
    ],
    ids=lambda rope: f"{rope.kind}-{rope.theta:g}-{rope.factor:g}",
)
def test_frequencies_at_real_sizes_are_those_of_transformers_to_rounding(rope, tmp_path):
    """At head_dim 128 and real contexts, which the tiny models do not reach."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = dataclasses.replace(TINY, head_dim=128, max_position=131_072, rope=rope)
    export_hf(tmp_path, config, init_params(config))
    expected = LlamaRotaryEmbedding(transformers.LlamaConfig.from_pretrained(tmp_path))
    found = layer_ropes(load_model(tmp_path, load_format="dummy")[0])[0]
    # transformers rounds each power to float32, we once at the end.
    np.testing.assert_allclose(found.inv_freq, expected.inv_freq.numpy(), rtol=5e-7)
    assert found.scale == pytest.approx(expected.attention_scaling, rel=1e-12)
