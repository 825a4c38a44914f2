"""The adapter that a request names, as in vLLM. Knows no arrays, no files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.files import path_problem


@dataclasses.dataclass(frozen=True)
class LoRARequest:
    """An adapter for a request, in an engine with `enable_lora`.

    Args:
      lora_name: its name in errors.
      lora_int_id: vLLM's number of the adapter, from 1. Adapters are told apart by their contents, not by this number.
      lora_path: folder with adapter_config.json and adapter_model.safetensors, as PEFT saves them, or a name of the
        Hugging Face hub: org/name or org/name@revision.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self):
        if not (isinstance(self.lora_name, str) and self.lora_name):
            raise ValueError(f"lora_name is {self.lora_name!r:.60}, must be a name")
        if not (isinstance(self.lora_path, str) and self.lora_path):
            raise ValueError(f"lora_path is {self.lora_path!r:.60}, must be the path of a folder or a name of the hub")
        checks.require(path_problem("lora_path", self.lora_path), checks.integer("lora_int_id", self.lora_int_id))


def salted(digest: str, cache_salt: str, kind: str = "lora") -> str:
    """Returns the salt of a request's prefixes, given its own: they depend on its adapter and, last, its "steering"."""
    return f"{kind} {digest}\0{cache_salt}"


def unsalted(salt: str) -> dict[str, str]:
    """Returns the parts of a salt of prefixes: the request's own "salt", and digests of "adapter" and "steering", each
    empty without one."""
    found = {"salt": salt, "adapter": "", "steering": ""}
    for name, kind in (("steering", "steering "), ("adapter", "lora ")):
        before, end, own = found["salt"].partition("\0")
        if end and before.startswith(kind):
            found |= {name: before.removeprefix(kind), "salt": own}
    return found


def of_prompts(given: Any, num_prompts: int) -> Sequence[Any]:
    """Returns the adapter of each prompt, given one for all of them or a list of one or None for each.

    Raises:
      ValueError: there are not as many as prompts.
    """
    each = given if isinstance(given, (list, tuple)) else [given] * num_prompts
    if len(each) != num_prompts:
        raise ValueError(f"{num_prompts} prompts and {len(each)} lora_requests were given")
    return each
