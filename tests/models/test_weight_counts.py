"""Counts of weights by a model's config, beside the counts of published models."""

import pytest

from ksana_jax.models.families import config_from_hf
from ksana_jax.models.params import num_active_params, num_params
from tests.models.hf_configs import (
    FALCON,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_NEOX,
    GPT_OSS,
    LLAMA,
    MIXTRAL,
    MPT,
    OLMOE,
    OPT,
    QWEN2_MOE,
    QWEN3_MOE,
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
        (
            GPT_NEOX | {"vocab_size": 50_304, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6},
            70_426_624,
        ),  # Pythia 70M
        (GPT2 | {"vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}, 124_439_808),
        (
            OPT
            | {
                "vocab_size": 50_272,
                "hidden_size": 768,
                "ffn_dim": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "max_position_embeddings": 2048,
            },
            125_239_296,
        ),  # OPT 125M
        (
            MIXTRAL
            | {
                "vocab_size": 32_000,
                "hidden_size": 4096,
                "intermediate_size": 14_336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
            },
            46_702_792_704,
        ),  # Mixtral 8x7B
        (
            QWEN3_MOE
            | {
                "vocab_size": 151_936,
                "hidden_size": 2048,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
            },
            30_532_122_624,
        ),  # Qwen3-30B-A3B
        (
            QWEN2_MOE
            | {"vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 24}
            | {"num_attention_heads": 16, "num_key_value_heads": 16},
            14_315_784_192,
        ),  # Qwen1.5-MoE-A2.7B
        (
            OLMOE
            | {"vocab_size": 50_304, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 1024}
            | {"num_attention_heads": 16, "num_key_value_heads": 16},
            6_919_161_856,
        ),  # OLMoE-1B-7B
        (
            GPT_OSS
            | {"vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24}
            | {"num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32},
            20_914_757_184,
        ),  # gpt-oss-20b
        (
            FALCON | {"vocab_size": 65_024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71},
            6_921_720_704,
        ),  # Falcon 7B
        (MPT | {"vocab_size": 50_432, "d_model": 4096, "n_layers": 32, "n_heads": 32}, 6_649_286_656),  # MPT 7B
    ],
)
def test_models_have_as_many_weights_as_their_makers_say(values, expected):
    assert num_params(config_from_hf(values)) == expected


def test_of_experts_only_the_chosen_are_active():
    sizes = {"vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
    config = config_from_hf(QWEN3_MOE | sizes | {"num_key_value_heads": 4, "head_dim": 128})
    assert num_params(config) - num_active_params(config) == 48 * 3 * 120 * 768 * 2048
    assert num_active_params(config) == 3_353_032_704  # "A3B", embedding and head included
    assert num_active_params(config_from_hf(LLAMA)) == num_params(config_from_hf(LLAMA))
