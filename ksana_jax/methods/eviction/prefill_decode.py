"""One method for prompts and another for what follows them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.eviction.base import Array, Cached, EvictionMethod
from ksana_jax.kv.eviction.wrapper import EvictionWrapper, bare, own_setting
from ksana_jax.methods.eviction.snapkv import SnapKV
from ksana_jax.methods.eviction.tova import TOVA


def _either(name: str) -> Any:
    """Returns an attribute that is true if it is of one of the methods."""
    return property(lambda self: getattr(self.inner, name) or getattr(self.after, name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillDecode(EvictionWrapper):
    """Evicts from a prompt, when it is complete, by the method inside, and from what follows by another one.

    Attention weights of queries before an eviction in the prompt, or in its question, count as the method inside counts
    them, weights of later queries as the other does. Both have one budget; kvpress' PrefillDecodingPress has two.

    Args:
      of: of prompts. decode: of what follows, {"method": a name} and its own settings; or an `EvictionMethod`.
    """

    of: Any = dataclasses.field(default_factory=SnapKV)
    decode: Any = dataclasses.field(default_factory=TOVA)
    prompts: Any = "whole"

    observes: ClassVar[Any] = _either("observes")
    resets_scores: ClassVar[Any] = _either("resets_scores")
    needs_text_positions: ClassVar[Any] = _either("needs_text_positions")
    once: ClassVar[Any] = False
    head_by_head: ClassVar[Any] = property(lambda self: self.inner.head_by_head and self.after.head_by_head)

    def __post_init__(self):
        self._read("decode")
        super().__post_init__()
        name, of, after = "kv_eviction PrefillDecode", self.inner, self.after
        if self.prompts != "whole":
            raise ConfigError(
                f"{name}: prompts is {self.prompts!r}, must be 'whole': each method has queries of its own"
            )
        for method in (of, after):
            special = "custom_logits needs_full_text per_head probes merges reads_ropes reads_outputs".split()
            if any(getattr(method, x) for x in special) or method.state_shape(1, 2) or method.constants():
                raise ConfigError(f"{name}: {type(method).__name__} reads more than attention weights, keys and values")
        if of.observes and after.observes and of.resets_scores != after.resets_scores:
            adds, resets = (after, of) if of.resets_scores else (of, after)
            raise ConfigError(
                f"{name}: {type(adds).__name__} adds up attention weights throughout a text, which "
                f"{type(resets).__name__} resets"
            )

    @functools.cached_property
    def after(self) -> EvictionMethod:
        """The method of what follows a prompt, with this one's settings of all methods."""
        return self._with_common(self.decode)

    @property
    def stored(self) -> str:
        return super(EvictionWrapper, self).stored

    @property
    def compiled(self) -> EvictionMethod:
        return dataclasses.replace(super().compiled, decode=bare(self.after.compiled))

    @property
    def setting(self) -> dict[str, Any]:
        return super().setting | {"decode": own_setting(self.decode)}

    def query_numbers(self, until_eviction: np.ndarray, num_outputs: np.ndarray) -> np.ndarray | None:
        numbers = [m.query_numbers(until_eviction, num_outputs) for m in (self.inner, self.after)]
        if all(x is None for x in numbers):
            return None
        of_prompt, of_outputs = (1 if x is None else x for x in numbers)
        return np.where(until_eviction + num_outputs <= 1, of_prompt, of_outputs).astype(np.float32)

    @property
    def counts_outputs(self) -> bool:
        return self.weights_queries

    def priority(self, cached: Cached, xp: Any) -> Array:
        is_prompt = (cached.length == cached.num_prompt)[:, None, None, None]
        return xp.where(is_prompt, self.inner.priority(cached, xp), self.after.priority(cached, xp))
