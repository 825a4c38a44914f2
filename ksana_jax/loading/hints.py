"""Explains a folder or a set of tensors that is not a model to load. Reads no weights."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ksana_jax.core.gguf_file import SUFFIX

MAX_NAMED = 5


def folder_hint(directory: Path) -> str:
    """Returns advice for a folder that lacks the files of a model, after "; ", or ""."""
    adapter = directory / "adapter_config.json"
    if adapter.is_file():
        try:
            config: Any = json.loads(adapter.read_bytes())
            base = f" of {config['base_model_name_or_path']!r:.120}"
        except (ValueError, LookupError, TypeError, OSError, RecursionError):
            base = ""
        return f"; it is an adapter{base}: load its model with enable_lora and name it in a LoRARequest, or merge it"
    below = sorted(str(path.relative_to(directory)) for path in directory.glob(f"*/*{SUFFIX}"))
    if not below:
        return ""
    more = f" and {len(below) - MAX_NAMED:,} more" * (len(below) > MAX_NAMED)
    return f"; give the path of a GGUF file below it: {', '.join(below[:MAX_NAMED])}{more}"


def prefix_hint(embed: str, names: Collection[str]) -> str:
    """Explains tensor names that all have another prefix than expected, or returns "".

    Args:
      embed: the expected name of the embedding. names: the tensors found.
    """
    if embed in names:
        return ""
    for name in names:
        if embed.endswith(f".{name}"):
            prefix = embed.removesuffix(name)
            return f"names of tensors lack the prefix {prefix!r}, as AutoModel saves them; AutoModelForCausalLM has it"
        if name.endswith(f".{embed}"):
            extra = name.removesuffix(embed)
            return (
                f"names of tensors begin with {extra!r:.80}, as in a larger model or a wrapper; save the "
                "language model by itself"
            )
    return ""
