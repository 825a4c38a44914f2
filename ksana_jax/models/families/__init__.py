"""Model families by Hugging Face `model_type`: how to read a config, and the names of the weights.

A new family is one file with a `Family` and one entry in FAMILIES. Nothing here touches arrays or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.models.families.cohere import COHERE, COHERE2
from ksana_jax.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32
from ksana_jax.models.families.falcon import FALCON
from ksana_jax.models.families.family import Family, read_config, write_config
from ksana_jax.models.families.gemma import GEMMA
from ksana_jax.models.families.gemma2 import GEMMA2
from ksana_jax.models.families.gemma3 import GEMMA3
from ksana_jax.models.families.glm4 import GLM4
from ksana_jax.models.families.glm4_moe_lite import GLM4_MOE_LITE
from ksana_jax.models.families.gpt2 import GPT2
from ksana_jax.models.families.gpt_neox import GPT_NEOX
from ksana_jax.models.families.gpt_oss import GPT_OSS
from ksana_jax.models.families.granite import GRANITE
from ksana_jax.models.families.granitemoe import GRANITEMOE
from ksana_jax.models.families.granitemoehybrid import GRANITEMOEHYBRID
from ksana_jax.models.families.lfm2 import LFM2
from ksana_jax.models.families.llama import LLAMA
from ksana_jax.models.families.llama_cla import LLAMA_CLA
from ksana_jax.models.families.llama_sinks import LLAMA_SINKS
from ksana_jax.models.families.minicpm3 import MINICPM3
from ksana_jax.models.families.ministral import MINISTRAL, MINISTRAL3
from ksana_jax.models.families.mistral import MISTRAL
from ksana_jax.models.families.mistral4 import MISTRAL4
from ksana_jax.models.families.mixtral import MIXTRAL
from ksana_jax.models.families.mpt import MPT
from ksana_jax.models.families.olmo2 import OLMO2
from ksana_jax.models.families.olmo3 import OLMO3
from ksana_jax.models.families.olmo_hybrid import OLMO_HYBRID
from ksana_jax.models.families.olmoe import OLMOE
from ksana_jax.models.families.opt import OPT
from ksana_jax.models.families.phi3 import PHI3
from ksana_jax.models.families.qwen2 import QWEN2
from ksana_jax.models.families.qwen2_moe import QWEN2_MOE
from ksana_jax.models.families.qwen3 import QWEN3
from ksana_jax.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from ksana_jax.models.families.qwen3_moe import QWEN3_MOE
from ksana_jax.models.families.qwen3_next import QWEN3_NEXT
from ksana_jax.models.families.smollm3 import SMOLLM3
from ksana_jax.models.families.stablelm import STABLELM
from ksana_jax.models.families.youtu import YOUTU

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        LLAMA_SINKS,
        LLAMA_CLA,
        MISTRAL,
        MINISTRAL,
        MINISTRAL3,
        QWEN2,
        QWEN3,
        GEMMA,
        GEMMA2,
        GEMMA3,
        OLMO2,
        OLMO3,
        SMOLLM3,
        GRANITE,
        GLM4,
        PHI3,
        STABLELM,
        COHERE,
        COHERE2,
        GPT_NEOX,
        OPT,
        GPT2,
        FALCON,
        MPT,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        OLMOE,
        GRANITEMOE,
        GPT_OSS,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        DEEPSEEK_V32,
        GLM4_MOE_LITE,
        MISTRAL4,
        YOUTU,
        MINICPM3,
        LFM2,
        OLMO_HYBRID,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        GRANITEMOEHYBRID,
    )
}

# Names of the same configs and weights, by which config.json tells engines apart.
SAME = {"kimi_k2": "deepseek_v3"} | {f.whole: f.model_type for f in FAMILIES.values() if f.whole is not None}
# Fields that count where the config of a whole model has them, not those of its `text_config`.
OF_WHOLE = ("tie_word_embeddings", "bos_token_id", "eos_token_id")


def family_of(values: Mapping[str, Any], source: str = "config.json") -> Family:
    """Returns the family of a Hugging Face config, by `model_type` and `architectures`.

    Raises:
      ConfigError: neither names a known family, or they name something other than a causal language model.
    """
    supported = "; ".join(f"{f.model_type} ({', '.join(f.architectures)})" for f in FAMILIES.values())
    by_architecture = {name: family for family in FAMILIES.values() for name in family.architectures}
    kind, architectures = values.get("model_type"), values.get("architectures")
    kind = SAME.get(kind, kind) if isinstance(kind, str) else kind
    if architectures is None:
        architectures = []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ConfigError(f"{source}: architectures is {architectures!r}; must be a list of names, one of {supported}")
    for name in architectures:
        if name not in by_architecture:
            raise ConfigError(f"{source}: architectures names {name!r}; supported: {supported}")
        kind = by_architecture[name].model_type if kind is None else kind
        if by_architecture[name].model_type != kind:
            raise ConfigError(
                f"{source}: model_type {kind!r} and architectures {name!r} differ; supported: {supported}"
            )
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(f"{source}: model_type is {kind!r}; supported: {supported}")
    return FAMILIES[kind]


def config_from_hf(values: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Reads a parsed Hugging Face config.

    Args:
      source: origin of the config, for error messages.

    Raises:
      ConfigError: fields are invalid or unsupported; one line names the source and all of them.
    """
    family, text = family_of(values, source), values.get("text_config")
    if family.whole is not None and isinstance(text, Mapping):
        values = {**text, **{name: values[name] for name in OF_WHOLE if values.get(name) is not None}}
    return read_config(family, values, source)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Converts a model's config to a Hugging Face config, in fields that every version of transformers reads.

    Raises:
      ConfigError: the family's config cannot express this model; the error names the fields that would be lost.
    """
    checks.require(checks.one_of("family", config.family, FAMILIES), error=ConfigError)
    values = write_config(FAMILIES[config.family], config)
    read = config_from_hf(values, f"{config.family} config")
    of_layers = {"pattern": "pattern", "rope": "rope", "attention_scale": "scale"}
    names = [name for name in config.__dataclass_fields__ if name not in of_layers]
    lost = [name for name in names if getattr(read, name) != getattr(config, name)]
    for name, field in of_layers.items():
        before, after = ([getattr(layer.attention, field) for layer in c.layers] for c in (config, read))
        lost += [name] * (before != after)
    if lost:
        shown = ", ".join(f"{name} {getattr(config, name)}" for name in lost)
        raise ConfigError(f"a Hugging Face config of family {config.family} cannot express {shown}")
    return values
