"""Reads a model's configuration from the metadata of a GGUF file. Knows no blocks.

Keys become fields of a Hugging Face config, which the families of `models.families` read. A key that this file does not
know is an error unless its value marks it as unused, because most keys change the numbers.
Source: llama.cpp (hyperparameters of its architectures) and gguf.constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.gguf_file import GGUFFile
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.loading import gguf_families, gguf_hybrids
from ksana_jax.loading.gguf_blocks import FLOATS
from ksana_jax.loading.gguf_tensors import LONGROPE, ROPE_FACTORS, WITH_LONGROPE, as_stored
from ksana_jax.models.families import config_from_hf
from ksana_jax.models.families.fields import MAX_INTEGER, MAX_LAYERS
from ksana_jax.tokenizers.gguf_tokenizer import SpecialIds, special_ids

# Hugging Face's model_type by GGUF architecture.
ARCHITECTURES = {name: name for name in ("llama", "qwen2", "qwen3", "gemma", "gemma2")} | {"gemma3": "gemma3_text"}
ARCHITECTURES |= {name: name for name in ("olmo2", "smollm3", "granite", "glm4", "phi3")}
ARCHITECTURES |= {"gptneox": "gpt_neox", "falcon": "falcon", "mpt": "mpt", "gpt2": "gpt2", "stablelm": "stablelm"}
ARCHITECTURES |= {"command-r": "cohere", "cohere2": "cohere2", "gpt-oss": "gpt_oss", "granitemoe": "granitemoe"}
ARCHITECTURES |= {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "olmoe": "olmoe", "deepseek2": "deepseek_v2"}
ARCHITECTURES |= {"minicpm3": "minicpm3"} | gguf_hybrids.HYBRIDS
# Architectures whose names converters also give models of another family.
SHARED = {"mistral": "llama", "mixtral": "llama", "olmo3": "olmo2"}
SHARED |= dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "youtu"), "deepseek2")
# Families by architecture with experts. A llama has experts if it has their number.
EXPERTS = {"llama": "mixtral", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "olmoe": "olmoe"}
EXPERTS |= {"gpt-oss": "gpt_oss", "granitemoe": "granitemoe", "granitehybrid": "granitemoehybrid"}
EXPERTS |= {"qwen3next": "qwen3_next", "qwen35moe": "qwen3_5_moe_text"}
EXPERT_COUNT, EXPERTS_USED, EXPERT_WIDTH = "expert_count", "expert_used_count", "expert_feed_forward_length"
SHARED_WIDTH = "expert_shared_feed_forward_length"
EXPERT_SIZES = {
    EXPERTS_USED: "num_experts_per_tok",
    EXPERT_WIDTH: "moe_intermediate_size",
    SHARED_WIDTH: "shared_expert_intermediate_size",
}
# Fields by key, without the architecture before it.
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
EPS = "attention.layer_norm_rms_epsilon"
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# Widths that must all equal a head's width; some architectures rotate a part of it.
ROTATED = "rope.dimension_count"
PARTIAL = ("glm4", "phi3", "gptneox", "stablelm", "qwen3next", "qwen35", "qwen35moe")
WIDTHS = ("attention.key_length", "attention.value_length", ROTATED)
WIDTHS += tuple(f"{name}_swa" for name in WIDTHS)
ORIGINAL = "rope.scaling.original_context_length"
YARN = {
    ORIGINAL: "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
WINDOW, WINDOW_PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
# Known keys that change nothing: the embedding gives the vocabulary's size, and these norms have no mean.
UNUSED = ("vocab_size", "tensor_data_layout", gguf_families.EPS, "rope.scaling.finetuned")
KNOWN = {*SIZES, EPS, *SOFT_CAPS, *WIDTHS, *YARN, WINDOW, WINDOW_PATTERN, *UNUSED, "attention.head_count_kv"}
KNOWN |= {"rope.freq_base", "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor"}
# Fields of Granite by key; other architectures use the same keys to say that nothing is scaled.
SCALES = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
# Keys whose values become fields as they are, unless they have one for each layer.
ONE_VALUE = {EXPERT_COUNT, *EXPERT_SIZES, *SCALES, *gguf_families.KEYS, "rope.scaling.attn_factor"}
# Values, other than 0, false and "", with which further keys change nothing.
CAUSAL = "attention.causal"
NEUTRAL = {
    "expert_gating_func": 1,  # softmax
    CAUSAL: True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scale_linear": 1.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
}
# Every n-th layer is full, where the file does not say which slide.
PATTERNS = {"gemma2": 2, "gemma3": 6, "olmo2": 4}
# Gemmas also have soft caps. The 27B models, known by their number of layers, scale scores by the model's width per
# head, not by a head's.
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def gguf_config(file: GGUFFile) -> ModelConfig:
    """Reads the configuration of a GGUF model.

    Raises:
      ConfigError: the architecture is unknown, or values are invalid or unsupported; one line names all of them.
      TokenizerError: ids of special tokens are not in the file's vocabulary.
      LoadError: the divisors of the rope's frequencies cannot be read.
    """
    for key, value in (("general.type", "mmproj"), ("general.architecture", "clip")):  # newer and older converters
        if str(file.metadata.get(key)) == value:
            said = f"{key} is {value!r}, must be 'model'" if value == "mmproj" else f"{key} is {value!r}"
            raise ConfigError(f"{file.path}: {said}: it encodes images or sounds, give the file of the model itself")
    values = hf_values(file)
    config = config_from_hf(gguf_families.in_own_names(values), str(file.path))
    if ROPE_FACTORS not in file.tensors:
        return config
    # Llama 3.1 has its stretched frequencies as divisors in a tensor, where Hugging Face has the formula's numbers.
    info = file.tensors[ROPE_FACTORS]
    half = config.head_dim // 2
    if info.shape != (half,):
        raise ConfigError(f"{file.path}: {ROPE_FACTORS} has shape {list(info.shape)}, must be [{half}], half of a head")
    factors = as_stored(info).read(slice(None), slice(None)).astype(np.float64)
    rope = RopeConfig("factors", values["rope_theta"], factors=tuple(factors.tolist()))
    try:
        return dataclasses.replace(config, rope=rope).validate()
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from None


def gguf_dtype(file: GGUFFile) -> str:
    """Returns the dtype of the matrices: "f32", "bf16" or "f16".

    It is "f32" for quantised ones: bf16 has 8 bits, fewer than the scale of a block. Norms are f32 in any file.
    """
    kinds = {info.type.name for info in file.tensors.values() if len(info.shape) > 1}
    only = next(iter(kinds)) if len(kinds) == 1 else "F32"
    return only.lower() if only in FLOATS else "f32"


def hf_values(file: GGUFFile) -> dict[str, Any]:
    """Returns the fields of a Hugging Face config.

    Raises:
      ConfigError: the architecture is unknown, or keys are missing or unsupported; one line names all of them.
    """
    if not isinstance(kind := file.metadata.get("general.type", "model"), str) or kind != "model":
        raise ConfigError(
            f"{file.path}: general.type is {kind!r:.60}, must be 'model'; an adapter is merged into its model first"
        )
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{file.path}: general.architecture is {architecture!r:.60}; supported: {known}")
    return _Keys(file, architecture).values()


class _Keys:
    """The metadata of one architecture; problems are collected."""

    def __init__(self, file: GGUFFile, architecture: str):
        self.file, self.architecture = file, architecture
        prefix = f"{architecture}."
        self.keys = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
        self.problems: list[str] = []

    def problem(self, key: str, supported: str) -> None:
        value = " ".join(repr(self.keys[key]).split()) if key in self.keys else "missing"
        self.problems.append(f"{self.architecture}.{' '.join(key.split()):.80} is {value:.60}; {supported}")

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value that may be given for each layer, if it is the same in all of them."""
        value = self.keys.get(key, default)
        if not isinstance(value, np.ndarray):
            return value
        if np.array_equal(len(value), self.keys.get("block_count", 0)) and len(set(value.tolist())) == 1:
            return value[0].item()
        self.problem(key, "supported: one value, or the same for each layer")
        return default

    def values(self) -> dict[str, Any]:
        """Returns the fields of a Hugging Face config.

        Raises:
          ConfigError: problems were found.
        """
        fields: dict[str, Any] = {"model_type": ARCHITECTURES[self.architecture]}
        recurrent = gguf_hybrids.take_layers(self.keys) if self.architecture in gguf_hybrids.HYBRIDS else []
        fields |= {name: self.get(key, 1) for key, name in SIZES.items()}
        fields["num_key_value_heads"] = self.get("attention.head_count_kv", fields["num_attention_heads"])
        for key in ("attention.head_count_kv", *WIDTHS):
            if checks.integer(key, self.get(key), 1, MAX_INTEGER, optional=True):
                self.problem(key, "must be a positive integer")
        for key in self.keys.keys() & ONE_VALUE:
            self.keys[key] = self.get(key)
        for key, name in SIZES.items():
            if checks.integer(key, fields[name], 1, MAX_LAYERS if key == "block_count" else MAX_INTEGER):
                self.problem(key, "must be a positive integer")
            elif key not in self.keys:
                self.problem(key, "every model has it")
        self.check()  # the code below computes with them
        latents: dict[str, Any] = {}
        if self.architecture in gguf_families.LATENTS:
            read_latents = gguf_families.LATENTS[self.architecture]
            try:
                latents = read_latents(self.keys, fields, self.file.tensors)
                if multiplier := self.keys.pop("rope.scaling.yarn_log_multiplier", 0):
                    latents["rope_scaling"] = gguf_families.with_mscale(self.rope()["rope_scaling"], multiplier)
            except ConfigError as error:
                raise ConfigError(f"{self.file.path}: {error}") from None
        fields |= self.shapes(fields)
        fields |= self.rope() | self.attention(fields) | self.special_ids(fields) | self.experts()
        if self.architecture in gguf_families.OWN:
            fields |= gguf_families.OWN[self.architecture](fields, self.keys, self.file.tensors)
        if self.architecture in gguf_hybrids.HYBRIDS:
            latents |= gguf_hybrids.read(fields, self.keys, recurrent, self.file.tensors)
        if self.architecture.startswith("granite"):
            fields |= {"attention_multiplier": fields["head_dim"] ** -0.5}
            fields |= {name: self.keys.pop(key) for key, name in SCALES.items() if key in self.keys}
        if self.architecture in gguf_families.LATENTS:
            del fields["head_dim"]
        self.refuse_others()
        self.check()
        return fields | latents

    def check(self) -> None:
        if self.problems:
            raise ConfigError(f"{self.file.path}: {'; '.join(dict.fromkeys(self.problems))}")

    def shapes(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        tensors = self.file.tensors
        if (embedding := tensors.get("token_embd.weight")) is None:
            self.problems.append("tensor token_embd.weight is missing")
        eps = gguf_families.EPS if self.architecture in gguf_families.LAYER_NORMS else EPS
        if eps not in self.keys:
            self.problem(eps, "every model has it")
        head_dim = self.get(WIDTHS[0], fields["hidden_size"] // fields["num_attention_heads"])
        rotated = self.get(ROTATED, head_dim)
        for key in WIDTHS:
            width = rotated if key.startswith(ROTATED) and self.architecture in PARTIAL else head_dim
            if self.get(key, width) != width:
                self.problem(key, f"supported: {width!r:.40}, the width of a head")
        partial = {"partial_rotary_factor": rotated / head_dim} if self.architecture in PARTIAL else {}
        return partial | {
            "vocab_size": embedding.shape[0] if embedding else 1,
            "head_dim": head_dim,
            "rms_norm_eps": self.get(eps),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        }

    def rope(self) -> dict[str, Any]:
        factor = self.get("rope.scaling.factor")
        kind = self.get("rope.scaling.type", "linear" if factor else "none")
        scaling: dict[str, Any] = {}
        if kind in ("linear", "yarn"):
            scaling = {"rope_type": kind, "factor": factor}
        elif kind != "none":
            self.problem("rope.scaling.type", "supported: none, linear, yarn")
        if kind == "yarn":
            scaling |= {name: self.get(key) for key, name in YARN.items() if key in self.keys}
        if ROPE_FACTORS in self.file.tensors and (scaling or self.architecture != "llama"):
            self.problems.append(f"tensor {ROPE_FACTORS} is supported by llama, without rope.scaling")
        theta = self.get("rope.freq_base", 10_000.0)
        if self.architecture == "gemma3":  # layers with a window have a separate rope, which is never scaled
            local = self.get("rope.freq_base_swa", 10_000.0)
            return {"rope_theta": theta, "rope_scaling": scaling, "rope_local_base_freq": local}
        if "rope.freq_base_swa" in self.keys and self.get("rope.freq_base_swa") != theta:
            self.problem("rope.freq_base_swa", f"supported: {theta!r:.40}, as rope.freq_base")
        if self.architecture in WITH_LONGROPE:
            return {"rope_theta": theta, "rope_scaling": scaling} | self.longrope()
        return {"rope_theta": theta, "rope_scaling": scaling}

    def experts(self) -> dict[str, Any]:
        """Returns the fields of experts; their weights add up to 1 as llama.cpp has it for the architecture."""
        may_lack = self.architecture in ("llama", "granitehybrid")
        if self.architecture not in EXPERTS or (may_lack and not self.get(EXPERT_COUNT)):
            return {}
        widths = (EXPERT_WIDTH,) if self.architecture.startswith(("qwen", "gpt-oss")) else ()
        for key in (EXPERT_COUNT, EXPERTS_USED, *widths):
            if checks.integer(key, self.get(key), 1):
                self.problem(key, "must be a positive integer, every model with experts has it")
        is_local = self.architecture in ("llama", "gpt-oss", "granitemoe", "granitehybrid")
        found = {"num_local_experts" if is_local else "num_experts": self.keys.pop(EXPERT_COUNT, 1)}
        found |= {name: self.keys.pop(key) for key, name in EXPERT_SIZES.items() if key in self.keys}
        if self.architecture == "qwen2moe":
            found["qkv_bias"] = "blk.0.attn_q.bias" in self.file.tensors
        elif self.architecture in ("qwen3moe", "qwen3next"):
            found["norm_topk_prob"] = True
        return found | {"model_type": EXPERTS[self.architecture]}

    def longrope(self) -> dict[str, Any]:
        """Returns fields of long contexts, for which files have the divisors of frequencies in tensors."""
        tensors = {name: self.file.tensors[tensor] for name, tensor in LONGROPE.items() if tensor in self.file.tensors}
        found = {"original_max_position_embeddings": self.get(ORIGINAL, self.get("context_length"))}
        if not tensors:
            return found
        form = {name: as_stored(info).read(slice(None), slice(None)).tolist() for name, info in tensors.items()}
        form |= {"rope_type": "longrope", "attention_factor": self.keys.pop("rope.scaling.attn_factor", 1.0)}
        return found | {"rope_scaling": form}

    def attention(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns windows, soft caps and the scale of scores."""
        window = self.get(WINDOW) or None
        # Converters give OLMo 3 the name olmo2.
        capped, slides = self.architecture in LAYERS_OF_27B, self.architecture == "olmo2" and window is not None
        for key in () if capped else SOFT_CAPS:
            if self.get(key):
                self.problem(key, f"supported by {', '.join(LAYERS_OF_27B)}")
        if not capped and not slides:
            if self.get(WINDOW_PATTERN):
                self.problem(WINDOW_PATTERN, f"supported by {', '.join(PATTERNS)}, with a window")
            if self.architecture in ("phi3", "cohere2", "gpt-oss"):
                return {"sliding_window": window}
            if window and self.architecture != "llama":
                self.problem(WINDOW, f"supported by llama, phi3, {', '.join(PATTERNS)}")
            # Converters give Mistral the name llama.
            return {"model_type": "mistral", "sliding_window": window} if window else {}
        num_layers = fields["num_hidden_layers"]
        found: dict[str, Any] = {key: self.get(key) or None for key in SOFT_CAPS if capped and key in self.keys}
        pattern = self.keys.get(WINDOW_PATTERN, PATTERNS[self.architecture])
        if window is None and self.architecture == "gemma3":
            pattern = np.zeros(num_layers, bool)
        elif window is not None:
            found["sliding_window"] = window
        if isinstance(pattern, np.ndarray):
            found["layer_types"] = [f"{'sliding' if slide else 'full'}_attention" for slide in pattern.tolist()]
        else:
            found["sliding_window_pattern"] = pattern
        if slides:
            return found | {"model_type": "olmo3"}
        width = fields["hidden_size"] // fields["num_attention_heads"]
        wide = num_layers == LAYERS_OF_27B[self.architecture]
        return found | {"query_pre_attn_scalar": width if wide else self.get(WIDTHS[0], width)}

    def special_ids(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns BOS, and all ids that end a text: of the text, a turn or a message."""
        metadata = self.file.metadata
        has_tokenizer = "tokenizer.ggml.tokens" in metadata
        ids = special_ids(metadata, str(self.file.path)) if has_tokenizer else SpecialIds(None, ())
        # One without a row in the embedding is never drawn, as with the tokenizer of a directory.
        drawn = [index for index in ids.eos if index < fields["vocab_size"]]
        return {"bos_token_id": ids.bos, "eos_token_id": drawn}

    def refuse_others(self) -> None:
        for key, value in self.keys.items():
            unused = value in ("", "none", []) if isinstance(value, (str, list)) else not np.any(value)
            neutral = key in NEUTRAL and np.all(value == NEUTRAL[key])
            if key not in KNOWN and not neutral and (not unused or key == CAUSAL):
                self.problem(key, "not supported")
