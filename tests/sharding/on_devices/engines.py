"""Models that eight devices can divide, engines around them that compile little, and requests of all kinds."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import ExpertsSpec, LatentSpec, RopeConfig
from ksana_jax.engine.build import build_engine
from ksana_jax.engine.settings import engine_config
from ksana_jax.methods.presets import read_patterns
from ksana_jax.models.params import init_params
from ksana_jax.scheduler.speculative import draft_lengths
from ksana_jax.scheduler.step.ladders import make_buckets

# Ids that fill two groups of 128 and part of a third: eight devices have one each, five of them only padding.
VOCAB = 300
MHA = ModelConfig(
    vocab_size=VOCAB, d_model=32, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=8, d_ff=64, max_position=128
)
MODELS = {
    "MHA": MHA,
    # With all that a layer can have besides.
    "GQA": dataclasses.replace(
        MHA, num_kv_heads=2, tie_embeddings=True, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm="head"
    ),
    "MLA": dataclasses.replace(
        MHA,
        **{"num_kv_heads": 1, "head_dim": 20, "attention_scale": 0.3, "mlp": "swiglu_experts"},
        latent=LatentSpec(12, 8, 6, 10, query_rank=16),
        rope=RopeConfig(partial_rotary_factor=0.4),
        experts=ExpertsSpec(8, 2, shared_d_ff=16, shared_gate=False, scoring="sigmoid", choice_bias=True, factor=1.5),
    ),
    "MQA": dataclasses.replace(
        MHA,
        **{"num_kv_heads": 1, "qk_norm": "projection", "norm_placement": "both", "mlp": "geglu"},
        **{"sinks": "learned", "soft_cap": 20.0, "logit_soft_cap": 30.0},
    ),
}
SETTINGS = {
    "block_size": 16,
    "num_blocks": 32,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "query_tile": 16,
    "operators": {"linear": "xla", "attention": "xla"},
}
RNG = np.random.default_rng(2)
PROMPTS = [{"prompt_token_ids": RNG.integers(2, VOCAB, n)} for n in (1, 3, 17, 33, 9, 16)]
NUM_TOKENS = 12


def asked(**given) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False} | given)


GREEDY = asked(temperature=0)
MIXED = [
    asked(temperature=0, logprobs=2),
    asked(temperature=1.0, seed=1),
    asked(temperature=0.7, seed=2, top_p=0.9),
    asked(temperature=2.0, seed=3, top_k=5),
    asked(temperature=1.5, seed=4, min_p=0.05),
    asked(temperature=0.9, seed=-6, repetition_penalty=1.3, logit_bias={4: 2.0, 299: 1.0}, presence_penalty=0.5),
]


@functools.cache
def params_of(name: str):
    params = init_params(MODELS[name], seed=3, std=0.5)

    def noise(x):  # biases and sink logits are made as zeros
        return x + np.random.default_rng(x.size).normal(0, 0.5, x.shape).astype(np.float32)

    layers = jax.tree.map(lambda x: noise(x) if x.ndim == 1 else x, params.layers)
    return dataclasses.replace(params, layers=layers)


def make_llm(name: str = "GQA", num_devices: int = 1, pattern=None, **settings) -> LLM:
    """An engine of some devices, with one bucket of each kind."""
    model = MODELS[name]
    patterns = read_patterns(pattern, model)
    config = engine_config(SETTINGS | {"tensor_parallel_size": num_devices} | settings).for_model(model, patterns)
    buckets = make_buckets(config, "cpu", draft_lengths(config))
    few = dataclasses.replace(
        buckets, decodes=buckets.decodes[-1:], tiles=buckets.tiles[-1:], widths=buckets.widths[-1:]
    )
    return LLM.around(build_engine(model, params_of(name), config, patterns=patterns, buckets=few))


def tokens_of(llm: LLM, params=None, prompts=PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, MIXED if params is None else params)
    llm.engine.scheduler.check()
    return [c.token_ids for o in outputs for c in o.outputs]


@functools.cache
def alone(name: str, num_devices: int = 1) -> LLM:
    """An engine that several tests share."""
    return make_llm(name, num_devices)


@functools.cache
def expected(name: str = "GQA") -> list[list[int]]:
    """Tokens of MIXED from one device."""
    return tokens_of(alone(name))
