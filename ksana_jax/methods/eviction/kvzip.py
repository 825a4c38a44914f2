"""KVzip: keeps the tokens that the model needs to repeat the context (Kim et al., arXiv:2505.23416, section 3)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.patterns import FAR
from ksana_jax.kv.eviction.base import Array, Cached, EvictionMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVzip(EvictionMethod):
    """Keeps the tokens with the largest attention weight that any query pays to them as the model repeats the context.

    After a context the model reads an instruction to repeat it, and the context again. A token's score is the maximum
    over these queries and the query heads of a KV head. This second pass leaves no other trace. It takes the time of
    a second prefill and, until it ends, the memory of two contexts; max_model_len must have room for both.

    The authors and kvpress repeat contexts of more than 2,000 tokens in chunks, with a softmax over the sinks, the
    chunk and its repetition; here all is one chunk. All KV heads keep equally many tokens, "uniform" in the authors'
    code; AdaKV with alpha 0 around this method divides them among the heads of a layer or, with layerwise false, of all
    layers, the default of the authors and of kvpress.

    Args:
      sinks: first tokens, such as a system prompt, which are kept; the authors do not repeat them, kvpress does.
      instruction: text before the repeated context, or its token ids for an engine without a tokenizer. Chat models
        need their template's end of a turn here, and the beginning of the answer.
    """

    prompts: Literal["whole", "once", "streamed"] = "once"
    instruction: str | tuple[int, ...] = "\n\nRepeat the previous context exactly.\n"

    observes: ClassVar[bool] = True
    score_reduction: ClassVar[Literal["sum", "max"]] = "max"
    probes: ClassVar[bool] = True

    def __post_init__(self):
        name, given = f"kv_eviction {type(self).__name__}", self.instruction
        if not isinstance(given, str):
            is_list = isinstance(given, (list, tuple)) and all(isinstance(i, int) and i >= 0 for i in given)
            checks.require(
                None if is_list else f"{name}: instruction is {given!r:.80}, must be a text or a list of token ids",
                error=ConfigError,
            )
            object.__setattr__(self, "instruction", tuple(given))
        super().__post_init__()
        checks.require(
            None if self.once else f"{name}: prompts is {self.prompts!r}, must be 'once': it repeats a whole context",
            error=ConfigError,
        )

    @property
    def compiled(self) -> EvictionMethod:
        return dataclasses.replace(super().compiled, instruction=KVzip.instruction)

    def encoded(self, tokenizer: Any) -> EvictionMethod:
        if not isinstance(self.instruction, str):
            return self
        if tokenizer is None:
            raise ConfigError(
                f"kv_eviction {type(self).__name__}: instruction is a text, and the engine has no tokenizer: give its "
                "token ids"
            )
        ids = tokenizer.encode(self.instruction, add_special_tokens=False)
        return dataclasses.replace(self, instruction=tuple(ids))

    def probe(self, context: np.ndarray) -> np.ndarray:
        assert not isinstance(self.instruction, str), "see `encoded`"
        return np.array([*self.instruction, *context], np.int32)

    def query_numbers(self, until_eviction: np.ndarray, num_outputs: np.ndarray) -> np.ndarray:
        return (until_eviction < FAR).astype(np.float32)

    def priority(self, cached: Cached, xp: Any) -> Array:
        return cached.scores
