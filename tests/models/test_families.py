"""Hugging Face configs as ModelConfig: what is read, what is assumed, what is refused."""

import dataclasses
import math

import pytest

from ksana_jax.config import ConfigError, ModelConfig
from ksana_jax.layer_spec import RopeConfig
from ksana_jax.models.families import FAMILIES, config_from_hf, config_to_hf
from ksana_jax.models.params import num_params
from ksana_jax.models.rope import make_rope
from ksana_jax.patterns import FULL, AttentionPattern

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3 = (
    SIZES | {"model_type": kind} for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
)


def without(values, *names):
    return {key: value for key, value in values.items() if key not in names}


def rope_of(values):
    return config_from_hf(values).layers[0].attention.rope


def test_llama_1_config_without_kv_heads_head_dim_or_rope_theta():
    config = config_from_hf(
        without(LLAMA, "num_key_value_heads", "model_type") | {"architectures": ["LLaMAForCausalLM"]}
    )
    assert (config.family, config.num_kv_heads, config.head_dim) == ("llama", 8, 8)
    assert config.rope == RopeConfig(theta=10_000.0)
    assert (config.norm_eps, config.bos_id, config.eos_ids) == (1e-6, 1, (2,))
    assert not config.tie_embeddings and config.pattern == FULL


def test_head_dim_is_taken_from_the_config_where_given_even_if_width_is_no_multiple_of_heads():
    assert config_from_hf(LLAMA | {"head_dim": 32}).head_dim == 32
    assert config_from_hf(LLAMA | {"head_dim": 32, "hidden_size": 60}).d_model == 60
    assert config_from_hf(LLAMA | {"head_dim": None}).head_dim == 8
    assert config_from_hf(QWEN3).head_dim == 128  # what transformers assumes for this family alone


def test_biases_follow_the_family():
    def biases(values):
        config = config_from_hf(values)
        return config.qkv_bias, config.out_bias, config.mlp_bias

    assert biases(LLAMA) == (False, False, False)
    assert biases(LLAMA | {"attention_bias": True, "mlp_bias": True}) == (True, True, True)
    assert biases(QWEN2) == (True, False, False)
    assert biases(QWEN3 | {"attention_bias": True}) == (True, True, False)
    assert config_from_hf(QWEN3).qk_norm and not config_from_hf(QWEN2).qk_norm


def test_mistral_window_slides_in_all_layers():
    assert config_from_hf(MISTRAL | {"sliding_window": 128}).pattern == AttentionPattern(window=128)
    assert config_from_hf(MISTRAL | {"sliding_window": None}).pattern == FULL
    assert config_from_hf(MISTRAL).pattern == AttentionPattern(window=4096)


@pytest.mark.parametrize("values", [QWEN2, QWEN3])
def test_qwen_windows_follow_max_window_layers_or_layer_types(values):
    slide = AttentionPattern(window=16)
    on = values | {"use_sliding_window": True, "sliding_window": 16}
    assert config_from_hf(values | {"sliding_window": 16, "max_window_layers": 0}).pattern == FULL
    assert config_from_hf(on | {"max_window_layers": 3}).pattern == (FULL, FULL, FULL, slide)
    assert config_from_hf(on | {"max_window_layers": 0}).pattern == slide
    assert config_from_hf(on | {"max_window_layers": 9}).pattern == FULL
    assert config_from_hf(on | {"sliding_window": None, "max_window_layers": 0}).pattern == FULL
    kinds = ["sliding_attention", "full_attention"] * 2
    assert config_from_hf(on | {"layer_types": kinds}).pattern == (slide, FULL, slide, FULL)


def test_gemma_2_layers_slide_in_turn_and_its_scores_are_capped():
    config = config_from_hf(GEMMA2)
    slide = AttentionPattern(window=4096)
    assert config.pattern == (slide, FULL, slide, FULL)
    assert (config.soft_cap, config.logit_soft_cap, config.attention_scale) == (50.0, 30.0, 1 / 16)
    assert (config.mlp, config.norm, config.sandwich_norms, config.embed_scale) == ("geglu", "rms_plus_one", True, 8.0)
    assert config.tie_embeddings and config.head_dim == 256 and not config.qk_norm
    assert config_from_hf(GEMMA2 | {"attn_logit_softcapping": None}).soft_cap is None


def test_gemma_3_has_a_rope_for_sliding_and_one_for_full_layers_in_the_older_and_the_newer_form():
    config = config_from_hf(GEMMA3 | {"num_hidden_layers": 7})
    assert [layer.attention.pattern.window for layer in config.layers] == [4096] * 5 + [None, 4096]
    assert [layer.attention.rope.theta for layer in config.layers] == [1e4] * 5 + [1e6, 1e4]
    assert config.qk_norm and (config.soft_cap, config.logit_soft_cap) == (None, None)
    older = {"rope_theta": 5e5, "rope_local_base_freq": 100.0, "rope_scaling": {"type": "linear", "factor": 8.0}}
    newer = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        }
    }
    every = {"sliding_window_pattern": 2}
    assert config_from_hf(GEMMA3 | older | every) == config_from_hf(GEMMA3 | newer | every)
    assert config_from_hf(GEMMA3 | older | every).rope == (RopeConfig(theta=100.0), RopeConfig("linear", 5e5, 8.0)) * 2
    assert (
        config_from_hf(GEMMA3 | {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}} | every).rope
        == (RopeConfig(theta=1e4), RopeConfig(theta=7.0)) * 2
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            GEMMA2
            | {
                "vocab_size": 256_000,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_key_value_heads": 4,
            },
            2_614_341_888,
        ),  # Gemma-2 2B
        (
            GEMMA3
            | {
                "vocab_size": 262_144,
                "hidden_size": 1152,
                "intermediate_size": 6912,
                "num_hidden_layers": 26,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
            },
            999_885_952,
        ),  # Gemma-3 1B
    ],
)
def test_gemmas_have_as_many_weights_as_their_makers_say(values, expected):
    assert num_params(config_from_hf(values)) == expected


def test_a_model_cut_off_keeps_what_its_first_layers_are_made_of():
    whole = config_from_hf(GEMMA3 | {"sliding_window_pattern": 2})
    cut = whole.first_layers(3)
    assert cut.num_layers == 3 and cut.layers == whole.layers[:3]
    assert config_from_hf(LLAMA).first_layers(2) == config_from_hf(LLAMA | {"num_hidden_layers": 2})


ROPES = {
    "default": ({}, RopeConfig(theta=5e5)),
    "linear": ({"factor": 4}, RopeConfig("linear", 5e5, 4.0)),
    "dynamic": ({"factor": 4.0, "original_max_position_embeddings": 7}, RopeConfig("dynamic", 5e5, 4.0, 4096)),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024},
        RopeConfig("llama3", 5e5, 8.0, 1024),
    ),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16, "mscale": 1.2, "truncate": False},
        RopeConfig("yarn", 5e5, 4.0, 1024, beta_fast=16.0, mscale=1.2, truncate=False),
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_older_and_newer_rope_forms_mean_the_same(kind):
    form, expected = ROPES[kind]
    older = LLAMA | {"rope_theta": 5e5}
    newer = LLAMA | {"rope_parameters": form | {"rope_type": kind, "rope_theta": 5e5}}
    assert config_from_hf(older | {"rope_scaling": form | {"type": kind}}).rope == expected
    assert config_from_hf(older | {"rope_scaling": form | {"rope_type": kind}}).rope == expected
    assert config_from_hf(newer).rope == expected
    assert config_from_hf(newer | {"rope_scaling": None, "rope_theta": 1.5}).rope == expected
    assert config_from_hf(newer | {"rope_scaling": form | {"rope_type": kind, "rope_theta": 5e5}}).rope == expected


def test_rope_original_context_has_transformers_order_of_precedence():
    def original(form, **beside):
        scaling = {"rope_type": "yarn", "factor": 4.0} | form
        return rope_of(LLAMA | {"rope_scaling": scaling} | beside).original_max_len

    assert original({}) == 4096
    assert original({"original_max_position_embeddings": 256}) == 256
    assert original({"original_max_position_embeddings": 256}, original_max_position_embeddings=512) == 512


def test_yarn_raises_the_context_that_is_not_stretched_yet():
    # Qwen2.5's model card: 32,768 positions in the config, factor 4 for 131,072.
    form = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert config_from_hf(LLAMA | {"rope_scaling": form}).max_position == 4 * 4096
    form["original_max_position_embeddings"] = 512
    assert config_from_hf(LLAMA | {"rope_scaling": form}).max_position == 4096
    form["factor"] = None
    assert rope_of(LLAMA | {"rope_scaling": form}).factor == 8.0


def test_special_ids_may_be_one_several_or_none():
    assert config_from_hf(LLAMA | {"eos_token_id": [5, 7, 5]}).eos_ids == (5, 7)
    assert config_from_hf(LLAMA | {"eos_token_id": None, "bos_token_id": None}).eos_ids == ()
    assert config_from_hf(QWEN2).bos_id is None


# What is changed in a config, and what the message must name.
REFUSED = [
    (LLAMA, {"model_type": "gpt2"}, ["'gpt2'", "llama", "mistral", "qwen2", "qwen3"]),
    (LLAMA, {"model_type": None}, ["model_type is None", "LlamaForCausalLM"]),
    (LLAMA, {"model_type": ["llama"]}, ["model_type"]),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "supported"]),
    (LLAMA, {"architectures": ["MistralForCausalLM"]}, ["'llama'", "'MistralForCausalLM'"]),
    (LLAMA, {"architectures": "LlamaForCausalLM"}, ["architectures", "list"]),
    (LLAMA, {"num_attention_heads": 0}, ["num_attention_heads is 0", "integer from 1"]),
    (LLAMA, {"num_key_value_heads": 0}, ["num_key_value_heads is 0"]),
    (LLAMA, {"num_key_value_heads": 3}, ["num_attention_heads is 8", "multiple of num_key_value_heads 3"]),
    (LLAMA, {"num_key_value_heads": 16}, ["num_attention_heads is 8", "multiple of num_key_value_heads 16"]),
    (LLAMA, {"hidden_size": 60}, ["hidden_size is 60", "multiple of num_attention_heads 8"]),
    (LLAMA, {"hidden_size": "64"}, ["hidden_size is '64'"]),
    (LLAMA, {"hidden_size": 64.0}, ["hidden_size is 64.0"]),
    (LLAMA, {"vocab_size": True}, ["vocab_size is True"]),
    (LLAMA, {"num_hidden_layers": -1}, ["num_hidden_layers is -1"]),
    (LLAMA, {"num_hidden_layers": 10**9}, ["num_hidden_layers is 1,000,000,000", "10,000"]),
    (LLAMA, {"intermediate_size": 2**40}, ["intermediate_size", "2,147,483,647"]),
    (LLAMA, {"head_dim": 7}, ["head_dim is 7", "even"]),
    (LLAMA, {"head_dim": 0}, ["head_dim is 0"]),
    (LLAMA, {"max_position_embeddings": None}, ["max_position_embeddings is None"]),
    (LLAMA, {"rms_norm_eps": 0.0}, ["rms_norm_eps is 0.0", "a finite number above 0"]),
    (LLAMA, {"rms_norm_eps": math.nan}, ["rms_norm_eps is nan"]),
    (LLAMA, {"rope_theta": math.nan}, ["rope_theta is nan", "a finite number above 0"]),
    (LLAMA, {"rope_theta": math.inf}, ["rope_theta is inf"]),
    (LLAMA, {"rope_theta": -1}, ["rope_theta is -1"]),
    (LLAMA, {"rope_theta": 5e-324}, ["rope_theta is 5e-324", "from 1 to 1e+15"]),
    (LLAMA, {"rope_theta": 1e300}, ["rope_theta is 1e+300"]),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 1e-300}}, ["rope_scaling.factor is 1e-300", "from 0.001"]),
    (
        LLAMA,
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1e300}},
        ["rope_scaling.attention_factor is 1e+300"],
    ),
    (
        LLAMA,
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1e-300, "high_freq_factor": 4}},
        ["rope_parameters.low_freq_factor is 1e-300"],
    ),
    (LLAMA, {"rope_theta": None}, ["rope_theta is None"]),
    (
        LLAMA,
        {"rope_scaling": {"type": "longrope", "factor": 2.0}},
        ["rope_scaling type is 'longrope'", "default, linear, dynamic, llama3, yarn"],
    ),
    (LLAMA, {"rope_parameters": {"rope_type": "mrope"}}, ["rope_parameters type is 'mrope'"]),
    (LLAMA, {"rope_scaling": {"type": ["yarn"]}}, ["rope_scaling type is ['yarn']"]),
    (LLAMA, {"rope_scaling": "linear"}, ["rope_scaling is 'linear'", "object"]),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor is None"]),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0}}, ["rope_scaling.factor is 0"]),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 3}}, ["'alpha'", "supported"]),
    (LLAMA, {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}, ["rope_scaling.type"]),
    (
        LLAMA,
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        ["rope_scaling and rope_parameters disagree"],
    ),
    (LLAMA, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["rope_parameters.low_freq_factor is None"]),
    (
        LLAMA,
        {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
        ["rope_scaling.high_freq_factor is 4.0", "low_freq_factor 4.0"],
    ),
    (
        LLAMA,
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}},
        ["rope_scaling.original_max_position_embeddings is 0"],
    ),
    (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": -1.0}}, ["attention_factor is -1.0"]),
    (LLAMA, {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_theta is 1.0"]),
    (QWEN3, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["'full_attention'", "supported"]),
    (LLAMA, {"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
    (LLAMA, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5", "1.0"]),
    (LLAMA, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
    (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq", "BF16"]),
    (LLAMA, {"sliding_window": 64}, ["sliding_window is 64", "mistral"]),
    (LLAMA, {"layer_types": ["sliding_attention"] * 4}, ["layer_types"]),
    (LLAMA, {"attention_bias": "yes"}, ["attention_bias is 'yes'", "true or false"]),
    (LLAMA, {"tie_word_embeddings": 1}, ["tie_word_embeddings is 1"]),
    (LLAMA, {"eos_token_id": 1000}, ["eos_token_id is 1,000", "vocab_size 1000"]),
    (LLAMA, {"eos_token_id": [2, -1]}, ["eos_token_id is [2, -1]"]),
    (LLAMA, {"bos_token_id": "<s>"}, ["bos_token_id is '<s>'"]),
    (MISTRAL, {"sliding_window": 0}, ["sliding_window is 0"]),
    (MISTRAL, {"attention_bias": True}, ["attention_bias is True", "false"]),
    (MISTRAL, {"sliding_window": 64, "layer_types": ["full_attention"] * 4}, ["layer_types", "sliding_window 64"]),
    (QWEN2, {"mlp_bias": True}, ["mlp_bias is True"]),
    (QWEN2, {"use_sliding_window": True, "max_window_layers": -1}, ["max_window_layers is -1"]),
    (QWEN2, {"use_sliding_window": True, "sliding_window": -5}, ["sliding_window is -5"]),
    (QWEN3, {"layer_types": ["full_attention"] * 3}, ["layer_types", "4 layers"]),
    (QWEN3, {"layer_types": ["chunked_attention"] * 4}, ["chunked_attention", "sliding_attention"]),
    (QWEN3, {"layer_types": ["sliding_attention"] * 4}, ["layer_types", "use_sliding_window"]),
    (GEMMA2, {"hidden_activation": "silu"}, ["hidden_activation is 'silu'", "gelu_pytorch_tanh"]),
    (GEMMA2, {"attn_logit_softcapping": 0.0}, ["attn_logit_softcapping is 0.0"]),
    (GEMMA2, {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "false"]),
    (GEMMA2, {"sliding_window": None}, ["sliding_window is None"]),
    (GEMMA2, {"layer_types": ["full_attention"] * 3}, ["layer_types", "4 layers"]),
    (GEMMA3, {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping is 50.0", "gemma2"]),
    (GEMMA3, {"rope_parameters": {"full_attention": {"rope_type": "mrope"}}}, ["rope_parameters.full_attention type"]),
    (GEMMA3, {"rope_parameters": {"full_attention": 3}}, ["rope_parameters.full_attention is 3", "object"]),
    (GEMMA3, {"rope_parameters": {"full_attention": {}, "linear_attention": {}}}, ["linear_attention"]),
    (GEMMA3, {"rope_local_base_freq": -1}, ["rope_local_base_freq is -1"]),
]


@pytest.mark.parametrize(("values", "change", "named"), REFUSED, ids=[str(change)[:70] for _, change, _ in REFUSED])
def test_config_that_cannot_be_is_refused_with_file_field_and_what_is_supported(values, change, named):
    config_from_hf(values)
    with pytest.raises(ConfigError) as refusal:
        config_from_hf(values | change, "some/config.json")
    message = str(refusal.value)
    assert message.startswith("some/config.json: ") and "\n" not in message
    for part in named:
        assert part in message


@pytest.mark.parametrize("name", [name for name in SIZES if name != "num_key_value_heads"])
def test_config_without_a_size_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        config_from_hf(without(LLAMA, name))


def test_all_problems_of_a_config_are_in_one_message():
    with pytest.raises(ConfigError) as refusal:
        config_from_hf(LLAMA | {"vocab_size": 0, "hidden_act": "relu", "rope_theta": math.nan})
    assert all(part in str(refusal.value) for part in ("vocab_size is 0", "hidden_act is 'relu'", "rope_theta is nan"))


SLIDING = (FULL, AttentionPattern(window=9))
GEMMA_SHAPE = {
    "d_model": 64,
    "head_dim": 256,
    "norm": "rms_plus_one",
    "mlp": "geglu",
    "sandwich_norms": True,
    "embed_scale": 8.0,
    "attention_scale": 144**-0.5,
    "tie_embeddings": True,
}
WRITABLE = [
    ModelConfig(vocab_size=64, num_layers=2, bos_id=3, eos_ids=(4, 5)),
    ModelConfig(num_layers=2, qkv_bias=True, out_bias=True, mlp_bias=True, tie_embeddings=True, rope=ROPES["yarn"][1]),
    ModelConfig(family="mistral", num_layers=2, pattern=AttentionPattern(window=9), rope=ROPES["linear"][1]),
    ModelConfig(family="mistral", num_layers=2, rope=ROPES["llama3"][1], max_position=8192),
    ModelConfig(family="qwen2", num_layers=2, qkv_bias=True, pattern=SLIDING),
    ModelConfig(family="qwen3", num_layers=2, qk_norm=True, pattern=SLIDING[::-1]),
    ModelConfig(family="qwen3", num_layers=2, qk_norm=True, qkv_bias=True, out_bias=True, eos_ids=(7,)),
    ModelConfig(
        **GEMMA_SHAPE, family="gemma2", num_layers=2, pattern=SLIDING[::-1], soft_cap=50.0, logit_soft_cap=30.0
    ),
    ModelConfig(**GEMMA_SHAPE, family="gemma2", num_layers=2, qkv_bias=True, out_bias=True),
    ModelConfig(
        **GEMMA_SHAPE,
        family="gemma3_text",
        num_layers=2,
        pattern=SLIDING,
        qk_norm=True,
        rope=(RopeConfig("linear", 1e6, 8.0), RopeConfig(theta=1e4)),
    ),
    ModelConfig(**GEMMA_SHAPE, family="gemma3_text", num_layers=2, pattern=SLIDING[1], qk_norm=True),
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
        ({"qk_norm": True}, "qk_norm True"),
        ({"qkv_bias": True}, "out_bias False"),
        ({"family": "mistral", "pattern": AttentionPattern(window=9, num_sinks=1)}, "pattern"),
        ({"family": "mistral", "mlp_bias": True}, "mlp_bias True"),
        ({"family": "qwen2"}, "qkv_bias False"),
        (
            {"family": "qwen2", "qkv_bias": True, "pattern": (AttentionPattern(window=8), AttentionPattern(window=9))},
            "pattern",
        ),
        ({"rope": RopeConfig("dynamic", factor=2.0, original_max_len=9)}, "rope"),
        ({"family": "gemma"}, "'gemma'"),
        ({"mlp": "geglu"}, "mlp geglu"),
        ({"soft_cap": 5.0}, "soft_cap 5.0"),
        ({"attention_scale": 0.3}, "attention_scale 0.3"),
        ({"rope": (RopeConfig(), RopeConfig(theta=5.0))}, "rope"),
    ],
)
def test_model_that_its_family_cannot_express_is_not_written(change, lost):
    with pytest.raises(ConfigError) as refusal:
        config_to_hf(dataclasses.replace(ModelConfig(num_layers=2), **change))
    assert lost in str(refusal.value)


def test_rope_of_numbers_without_finite_frequencies_is_refused():
    with pytest.raises(ValueError, match="rope has frequencies or a scale that are not finite"):
        make_rope(RopeConfig("linear", factor=1e-300), 8)
