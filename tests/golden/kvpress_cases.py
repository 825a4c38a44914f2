"""What kvpress kept of prompts, case by case, and the tiny Llama that read them; see make_kvpress.py. NumPy only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).parent / "kvpress"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}


# Not scaled by 1 / sqrt(H), which is a quarter.
SCALE = 0.25


class KVPressCase(NamedTuple):
    """What a press keeps of one prompt.

    press: name of a kvpress class. settings: its arguments, and those of `DecodingPress` if it goes on in the answer.
    length, seed: of the prompt. tokens: written greedily after it, if the press goes on. kept: [L][K] text positions.
    """

    press: str
    settings: dict[str, Any]
    length: int
    seed: int
    tokens: list[int]
    kept: list[list[list[int]]]

    @property
    def name(self) -> str:
        settings = " ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.press} {settings} of {self.length}"

    @property
    def prompt(self) -> list[int]:
        """Tokens, all different: equal ones have keys of equal norm in the first layer."""
        return np.argsort(np.random.RandomState(self.seed).random_sample(CONFIG["vocab_size"]))[: self.length].tolist()


def encode(text: str) -> list[int]:
    """Made-up token ids of a text: one for each of its words."""
    return [sum(map(ord, word)) % CONFIG["vocab_size"] for word in text.split(" ")] if text else []


def kvpress_cases() -> list[KVPressCase]:
    """All cases, in the order in which they were made."""
    return [KVPressCase(**json.loads(line)) for line in (FOLDER / "kept.jsonl").read_text().splitlines()]


def kvpress_defaults() -> dict[str, dict[str, Any]]:
    """{class of kvpress: {argument: its default}}."""
    return json.loads((FOLDER / "defaults.json").read_text())["defaults"]


def weights() -> dict[str, np.ndarray]:
    """The weights under the names of transformers, float32.

    The same everywhere: NumPy has frozen RandomState, whose uniform numbers need no function of the C library.
    """
    hidden, heads = CONFIG["hidden_size"], CONFIG["head_dim"] * CONFIG["num_attention_heads"]
    kv_heads, inner = CONFIG["head_dim"] * CONFIG["num_key_value_heads"], CONFIG["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(CONFIG["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (kv_heads, hidden),
            "self_attn.v_proj": (kv_heads, hidden),
            "self_attn.o_proj": (hidden, heads),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    rng, found = np.random.RandomState(11), {}
    for name, shape in shapes.items():
        values = 2 * rng.random_sample(shape) - 1
        found[name] = (1 + 0.3 * values if "norm" in name else 0.45 * values).astype(np.float32)
    return found


def statistics() -> dict[str, np.ndarray]:
    """Made-up numbers about the model: filters [L, K, H], and mean [L, N, H] and covariance [L, N, H, H] of queries."""
    layers, heads, size = (CONFIG[name] for name in ("num_hidden_layers", "num_attention_heads", "head_dim"))
    rng = np.random.RandomState(13)
    filters, mean, factors = (
        2 * rng.random_sample(shape) - 1
        for shape in ((layers, CONFIG["num_key_value_heads"], size), (layers, heads, size), (layers, heads, size, size))
    )
    found = {"filters": filters, "mean": mean, "covariance": factors @ np.swapaxes(factors, -1, -2) / size}
    return {name: x.astype(np.float32) for name, x in found.items()}


def queries() -> dict[str, np.ndarray]:
    """Of a prompt: means [L, N, H] and covariances of one head [L, H, H] of queries, and filters [L, K, H]."""
    found = json.loads((FOLDER / "queries.json").read_text())
    return {name: np.array(x) for name, x in found.items()}
