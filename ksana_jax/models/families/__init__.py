"""Model families by Hugging Face `model_type`: how to read a config, and the names of the weights.

A new family is one file with a `Family` and one entry in FAMILIES. Nothing here touches arrays or files.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.models.families.family import Family, read_config, write_config


class Families(MutableMapping[str, Family]):
    """Families by `model_type`; the module of one of ours is imported when the family is asked for.

    Args:
      places: "module:name" of each family by `model_type`, in this package.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._known: dict[str, Family | str] = dict(places)

    def __getitem__(self, kind: str) -> Family:
        found = self._known[kind]
        if isinstance(found, str):
            module, _, name = found.partition(":")
            found = self._known[kind] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return found

    def __setitem__(self, kind: str, family: Family) -> None:
        self._known[kind] = family

    def __delitem__(self, kind: str) -> None:
        del self._known[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


FAMILIES = Families(
    {
        "llama": "llama:LLAMA",
        "llama_sinks": "llama_sinks:LLAMA_SINKS",
        "llama_cla": "llama_cla:LLAMA_CLA",
        "mistral": "mistral:MISTRAL",
        "ministral": "ministral:MINISTRAL",
        "ministral3": "ministral:MINISTRAL3",
        "qwen2": "qwen2:QWEN2",
        "qwen3": "qwen3:QWEN3",
        "gemma": "gemma:GEMMA",
        "gemma2": "gemma2:GEMMA2",
        "gemma3_text": "gemma3:GEMMA3",
        "olmo2": "olmo2:OLMO2",
        "olmo3": "olmo3:OLMO3",
        "smollm3": "smollm3:SMOLLM3",
        "granite": "granite:GRANITE",
        "glm4": "glm4:GLM4",
        "phi3": "phi3:PHI3",
        "stablelm": "stablelm:STABLELM",
        "cohere": "cohere:COHERE",
        "cohere2": "cohere:COHERE2",
        "gpt_neox": "gpt_neox:GPT_NEOX",
        "opt": "opt:OPT",
        "gpt2": "gpt2:GPT2",
        "falcon": "falcon:FALCON",
        "mpt": "mpt:MPT",
        "mixtral": "mixtral:MIXTRAL",
        "qwen2_moe": "qwen2_moe:QWEN2_MOE",
        "qwen3_moe": "qwen3_moe:QWEN3_MOE",
        "olmoe": "olmoe:OLMOE",
        "granitemoe": "granitemoe:GRANITEMOE",
        "gpt_oss": "gpt_oss:GPT_OSS",
        "deepseek_v2": "deepseek:DEEPSEEK_V2",
        "deepseek_v3": "deepseek:DEEPSEEK_V3",
        "deepseek_v32": "deepseek:DEEPSEEK_V32",
        "glm4_moe_lite": "glm4_moe_lite:GLM4_MOE_LITE",
        "mistral4": "mistral4:MISTRAL4",
        "youtu": "youtu:YOUTU",
        "minicpm3": "minicpm3:MINICPM3",
        "lfm2": "lfm2:LFM2",
        "olmo_hybrid": "olmo_hybrid:OLMO_HYBRID",
        "qwen3_next": "qwen3_next:QWEN3_NEXT",
        "qwen3_5_text": "qwen3_5:QWEN3_5",
        "qwen3_5_moe_text": "qwen3_5:QWEN3_5_MOE",
        "granitemoehybrid": "granitemoehybrid:GRANITEMOEHYBRID",
        "kimi_linear": "kimi_linear:KIMI_LINEAR",
    }
)

# Families by the `model_type` of models that also read images, whose configs have the family's as `text_config`.
WHOLES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "mistral3": "mistral4"}
# And by names of the same configs and weights, by which config.json tells engines apart.
SAME = WHOLES | {"kimi_k2": "deepseek_v3"}
# Fields that count where the config of a whole model has them, not those of its `text_config`.
OF_WHOLE = ("tie_word_embeddings", "bos_token_id", "eos_token_id")


def family_of(values: Mapping[str, Any], source: str = "config.json") -> Family:
    """Returns the family of a Hugging Face config, by `model_type` and `architectures`.

    Raises:
      ConfigError: neither names a known family, or they name something other than a causal language model.
    """
    kind, architectures = values.get("model_type"), values.get("architectures")
    kind = SAME.get(kind, kind) if isinstance(kind, str) else kind
    if architectures is None:
        architectures = []
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is not None and isinstance(architectures, list) and all(n in family.architectures for n in architectures):
        return family  # without importing the others
    supported = "; ".join(f"{f.model_type} ({', '.join(f.architectures)})" for f in FAMILIES.values())
    by_architecture = {name: family for family in FAMILIES.values() for name in family.architectures}
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
    if family.model_type in WHOLES.values() and isinstance(text, Mapping):
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
