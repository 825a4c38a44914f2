"""Metadata of GGUF files as model configurations: the meaning of keys, and that no key that matters is ignored."""

import dataclasses
import json

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.loading import load_config
from ksana_jax.models.families import config_from_hf, config_to_hf
from ksana_jax.tokenizers import TokenizerError
from tests.gguf_writer import write_gguf
from tests.loading.gguf_on_disk import TWINS, gguf_metadata
from tests.loading.models_on_disk import TINY

EMBEDDING = {"token_embd.weight": np.zeros((TINY.vocab_size, TINY.d_model), np.float32)}
LLAMA = TWINS["llama"][1]
TIED = dataclasses.replace(TINY, tie_embeddings=True)


def read(folder, twin: str = "llama", tensors=EMBEDDING, config: ModelConfig | None = None, **changes) -> ModelConfig:
    architecture = TWINS[twin][0]
    metadata = gguf_metadata(architecture, config or TWINS[twin][1], **changes)
    return load_config(write_gguf(folder / "model.gguf", metadata, tensors))


def refusal(folder, *arguments, **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, *arguments, **changes)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'model.gguf'}: ") and "\n" not in message
    return message


def test_absent_keys_have_llama_cpps_defaults(tmp_path):
    absent = dict.fromkeys(("attention__head_count_kv", "attention__key_length", "attention__value_length"))
    found = read(tmp_path, rope__freq_base=None, **absent)
    assert (found.num_kv_heads, found.head_dim, found.rope) == (TINY.num_heads, 4, RopeConfig(theta=10_000.0))
    gemma = read(tmp_path, "gemma3", rope__freq_base=None, rope__scaling__type=None, rope__scaling__factor=None)
    assert gemma.rope == RopeConfig(theta=10_000.0)
    capped = read(tmp_path, "gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (capped.soft_cap, capped.logit_soft_cap) == (50.0, 30.0)


def test_values_of_each_layer_are_taken_if_they_are_equal(tmp_path):
    each = {"attention__head_count": 4, "attention__head_count_kv": 2, "feed_forward_length": 24}
    assert read(tmp_path, **{key: np.array([value] * 2, np.int32) for key, value in each.items()}) == TIED
    for key, value in each.items():
        wrong = {key: np.array([value, 2 * value], np.int32)}
        assert f"llama.{key.replace('__', '.')} is array([" in (said := refusal(tmp_path, **wrong))
        assert "supported: one value, or the same for each layer" in said
        assert "supported: one value" in refusal(tmp_path, **{key: np.array([value] * 3, np.int32)})


@pytest.mark.parametrize("twin, every", [("gemma2", 2), ("gemma3", 6)])
def test_layers_slide_by_pattern_and_window(tmp_path, twin, every):
    config = TWINS[twin][1]

    def windows(**changes) -> list[int | None]:
        found = read(tmp_path, twin, **changes).pattern
        listed = found if isinstance(found, tuple) else (found,) * config.num_layers
        return [pattern.window for pattern in listed]

    layers = range(config.num_layers)
    assert windows() == [None if (i + 1) % every == 0 else 6 for i in layers]
    assert windows(attention__sliding_window_pattern=3) == [None if (i + 1) % 3 == 0 else 6 for i in layers]
    slides = np.arange(config.num_layers) % 3 == 0
    assert windows(attention__sliding_window_pattern=slides) == [6 if slide else None for slide in slides]
    assert windows(attention__sliding_window=None) == (
        [None] * config.num_layers if twin == "gemma3" else [4096, None, 4096]
    )
    assert "layer_types" in refusal(tmp_path, twin, attention__sliding_window_pattern=slides[1:])


def test_second_rope_of_gemma3_is_that_of_sliding_layers_and_never_scaled(tmp_path):
    ropes = read(tmp_path, "gemma3", rope__freq_base_swa=20_000.0).rope
    assert (ropes[0], ropes[5]) == (RopeConfig(theta=20_000.0), RopeConfig("linear", 1e6, 8.0))
    assert "llama.rope.freq_base_swa is 20000.0; supported: 10000.0" in refusal(tmp_path, rope__freq_base_swa=20_000.0)


@pytest.mark.parametrize("twin, num_layers", [("gemma2", 46), ("gemma3", 62)])
def test_27b_models_scale_scores_by_the_width_per_head(tmp_path, twin, num_layers):
    assert read(tmp_path, twin, block_count=num_layers).attention_scale == 4**-0.5  # 16 / 4 heads
    assert read(tmp_path, twin, block_count=num_layers - 1).attention_scale == 8**-0.5


def test_scaled_ropes_are_read(tmp_path):
    linear = RopeConfig("linear", 10_000.0, 4.0)
    assert read(tmp_path, rope__scaling__type="linear", rope__scaling__factor=4.0).rope == linear
    assert read(tmp_path, rope__scaling__factor=4.0).rope == linear
    assert read(tmp_path, rope__scaling__type="none", rope__scaling__factor=4.0).rope == RopeConfig()
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__finetuned": np.bool_(True)}
    found = read(tmp_path, "qwen2", **yarn, rope__scaling__original_context_length=16, rope__scaling__attn_factor=1.0)
    assert found.rope == RopeConfig("yarn", 10_000.0, 4.0, 16)
    found = read(tmp_path, **yarn, rope__scaling__yarn_beta_fast=16.0, rope__scaling__yarn_beta_slow=2.0)
    assert found.rope == RopeConfig("yarn", 10_000.0, 4.0, 64, beta_fast=16.0, beta_slow=2.0)
    assert "rope.scaling.type is 'longrope'; supported: none, linear, yarn" in refusal(
        tmp_path, rope__scaling__type="longrope"
    )
    for name in ("attn_factor", "yarn_attn_factor"):
        said = f"rope.scaling.{name} is 1.5; not supported"
        assert said in refusal(tmp_path, **yarn, **{f"rope__scaling__{name}": 1.5})


def test_divisors_of_frequencies_must_fit(tmp_path):
    def with_factors(values, **changes):
        return {"tensors": EMBEDDING | {"rope_freqs.weight": np.array(values, np.float32)}, **changes}

    rope = read(tmp_path, **with_factors([1, 1, 2, 8])).rope
    assert rope == RopeConfig("factors", 10_000.0, factors=(1.0, 1.0, 2.0, 8.0))
    with pytest.raises(ConfigError, match="rope_scaling type is 'factors'"):
        config_to_hf(dataclasses.replace(TIED, rope=rope))
    said = refusal(tmp_path, **with_factors([1, 2, 3]))
    assert "rope_freqs.weight has shape [3], must be [4], half of a head" in said
    assert "rope factor is 0.0, must be a finite number above 0" in refusal(tmp_path, **with_factors([1, 1, 0, 8]))
    assert "rope factor is nan" in refusal(tmp_path, **with_factors([1, 1, np.nan, 8]))
    scaled = with_factors([1, 1, 2, 8], rope__scaling__type="linear", rope__scaling__factor=2.0)
    assert "supported by llama, without rope.scaling" in refusal(tmp_path, **scaled)
    assert "supported by llama, without rope.scaling" in refusal(tmp_path, "qwen3", **with_factors([1] * 6))


def test_ids_that_end_a_text_are_those_of_text_turn_and_message(tmp_path):
    config = read(tmp_path, config=dataclasses.replace(TINY, bos_id=7, eos_ids=(2, 5, 9)))
    assert (config.bos_id, config.eos_ids) == (7, (2, 5, 9))
    metadata = gguf_metadata("llama", dataclasses.replace(TINY, eos_ids=()))
    del metadata["tokenizer.ggml.bos_token_id"]
    config = load_config(write_gguf(tmp_path / "model.gguf", metadata, EMBEDDING))
    assert (config.bos_id, config.eos_ids) == (None, ())
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.eos_token_id is 99, must be an id below 32"):
        read(tmp_path, config=dataclasses.replace(TINY, eos_ids=(99,)))
    metadata["tokenizer.ggml.tokens"] += ["<|im_end|>"]  # the embedding has no row for it
    assert load_config(write_gguf(tmp_path / "model.gguf", metadata, EMBEDDING)).eos_ids == ()
    del metadata["tokenizer.ggml.tokens"]
    config = load_config(write_gguf(tmp_path / "model.gguf", metadata, EMBEDDING))
    assert (config.bos_id, config.eos_ids) == (None, ())


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_count": 0, "attention.causal": np.bool_(True), "logit_scale": 1.0, "pooling_type": 0},
        {"tensor_data_layout": "Meta AI original pth", "vocab_size": 99, "rope.scale_linear": 1.0},
        {"attention.clamp_kqv": 0.0, "attention.layer_norm_epsilon": 1e-6, "rope.dimension_count": 8},
    ],
)
def test_keys_that_change_nothing_are_accepted(tmp_path, changes):
    assert read(tmp_path, **changes) == TIED


@pytest.mark.parametrize(
    "twin, changes, said",
    [
        ("qwen2", {"expert_count": 8}, "qwen2.expert_count is 8; not supported"),
        ("llama", {"expert_count": 8}, "llama.expert_used_count is missing; must be a positive integer, every model"),
        ("mixtral", {"expert_used_count": 5}, "num_experts_per_tok is 5; must be at most num_local_experts 4"),
        ("mixtral", {"expert_gating_func": 2}, "llama.expert_gating_func is 2; not supported"),
        ("qwen3_moe", {"expert_feed_forward_length": None}, "qwen3moe.expert_feed_forward_length is missing"),
        ("olmoe", {"expert_count": 0}, "olmoe.expert_count is 0; must be a positive integer"),
        ("llama", {"attention.causal": np.bool_(False)}, "llama.attention.causal is False; not supported"),
        ("llama", {"rope.dimension_count": 4}, "llama.rope.dimension_count is 4; supported: 8, the width of a head"),
        ("llama", {"attention.value_length": 16}, "llama.attention.value_length is 16; supported: 8"),
        ("llama", {"attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv is 8.0; not supported"),
        ("llama", {"logit_scale": 0.5}, "llama.logit_scale is 0.5; not supported"),
        ("llama", {"attention.scale": 0.1}, "llama.attention.scale is"),
        ("llama", {"a.new.key": "of something"}, "llama.a.new.key is 'of something'; not supported"),
        ("llama", {"a.list": ["b"]}, "llama.a.list is ['b']; not supported"),
        ("llama", {"rope.dimension_sections": np.array([1, 2])}, "llama.rope.dimension_sections is array([1, 2])"),
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0; supported by gemma2, gemma3"),
        ("qwen2", {"attention.sliding_window": 6}, "qwen2.attention.sliding_window is 6; supported by llama, phi3"),
        ("qwen3", {"attention.sliding_window_pattern": 2}, "supported by gemma2, gemma3, olmo2"),
        ("olmo3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0; supported by gemma2, gemma3"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("llama", {"block_count": None}, "llama.block_count is missing; every model has it"),
        ("llama", {"attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ("llama", {"attention.head_count": 0}, "llama.attention.head_count is 0; must be a positive integer"),
        ("llama", {"embedding_length": "16"}, "llama.embedding_length is '16'; must be a positive integer"),
        ("llama", {"block_count": 2**31}, "llama.block_count is 2147483648; must be a positive integer"),
        ("llama", {"context_length": 2.5}, "llama.context_length is 2.5; must be a positive integer"),
        ("llama", {"rope.freq_base": "far"}, "rope_theta is 'far'"),
        ("llama", {"rope.freq_base": float("nan")}, "rope_theta is nan"),
        ("llama", {"attention.sliding_window": "x"}, "sliding_window is 'x'"),
        ("gemma2", {"attention.key_length": "x"}, "key_length is 'x'; must be a positive integer"),
        ("llama", {"attention.key_length": "x\n" * 99}, r"key_length is 'x\nx\nx\nx\nx\nx\nx\n"),
        ("granite", {"attention.key_length": 0}, "key_length is 0; must be a positive integer"),
        ("glm4", {"attention.value_length_swa": [1, 2]}, "value_length_swa is array([1, 2], dtype=int32); supported"),
        ("granite", {"residual_scale": [1, 2]}, "residual_scale is array([1, 2], dtype=int32); supported: one value"),
        ("llama", {"attention.head_count_kv": "x"}, "head_count_kv is 'x'; must be a positive integer"),
        ("mixtral", {"expert_count": [1, 2]}, "expert_count is array([1, 2], dtype=int32); supported: one value"),
        ("llama", {"block_count": np.array([2, 2])}, "block_count is array([2, 2]); supported: one value"),
        ("llama", {"a\nkey" + "x" * 99: 1}, f"llama.a key{'x' * 75} is 1; not supported"),
        ("gemma3", {"attention.sliding_window": np.array([1, 2, 3])}, "one value, or the same for each layer"),
    ],
)  # fmt: skip
def test_keys_that_are_wrong_or_not_supported_are_refused(tmp_path, twin, changes, said):
    assert said in refusal(tmp_path, twin, **changes)


def test_experts_without_a_width_are_refused_with_the_key(tmp_path):
    metadata = {key.replace("llama.", "gpt-oss."): value for key, value in gguf_metadata("llama", LLAMA).items()}
    path = write_gguf(tmp_path / "model.gguf", metadata | {"general.architecture": "gpt-oss"}, EMBEDDING)
    with pytest.raises(
        ConfigError, match=r"gpt-oss\.expert_feed_forward_length is missing; must be a positive integer"
    ):
        load_config(path)


def test_every_problem_is_in_the_one_line(tmp_path):
    said = refusal(tmp_path, expert_group_count=8, logit_scale=0.5, rope__dimension_count=4)
    assert all(key in said for key in ("expert_group_count", "logit_scale", "rope.dimension_count"))
    assert "tensor token_embd.weight is missing" in refusal(tmp_path, tensors={})


def test_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    for architecture, shown in (("mamba", "'mamba'"), (7, "7"), (["llama"], "['llama']")):
        path = write_gguf(tmp_path / "model.gguf", {"general.architecture": architecture}, EMBEDDING)
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        known = "supported: llama, qwen2, qwen3, gemma, gemma2, gemma3, olmo2, smollm3, granite, glm4, phi3"
        known += (
            ", gptneox, falcon, mpt, gpt2, stablelm, command-r, cohere2, gpt-oss, granitemoe, qwen2moe, "
            "qwen3moe, olmoe, deepseek2, minicpm3, lfm2, qwen3next, qwen35, qwen35moe, granitehybrid, kimi-linear"
        )
        assert str(caught.value) == f"{path}: general.architecture is {shown}; {known}"
    for kind, architecture, said in (
        ("mmproj", "clip", "type is 'mmproj', must be 'model': it encodes images or sounds, give the file"),
        (None, "clip", "architecture is 'clip': it encodes images or sounds"),  # of older converters
        ("adapter", "llama", "type is 'adapter', must be 'model'; an adapter is merged into its model first"),
    ):
        general = {"general.architecture": architecture} | ({} if kind is None else {"general.type": kind})
        with pytest.raises(ConfigError, match=said):
            load_config(write_gguf(tmp_path / "model.gguf", general, EMBEDDING))
    with pytest.raises(ConfigError, match=r"general\.architecture is None"):
        load_config(write_gguf(tmp_path / "model.gguf", {}, EMBEDDING))


def test_config_is_that_of_the_hugging_face_file(tmp_path):
    """Float32 numbers of the file become the decimals that the Hugging Face config has."""
    config = dataclasses.replace(TINY, norm_eps=1e-6, rope=RopeConfig(theta=500_000.0), tie_embeddings=True)
    assert read(tmp_path, config=config) == config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


def test_window_makes_a_llama_a_mistral(tmp_path):
    found = read(tmp_path, attention__sliding_window=6)
    assert (found.family, found.pattern) == ("mistral", AttentionPattern(window=6))
