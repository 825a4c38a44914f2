"""A research engine for KV-cache memory and scheduling in LLM inference.

Reading order: `request` (requests and outputs), `config` (settings), `patterns` (which positions a query sees),
`models/transformer` (the network), `ops/attention` and `ops/pool` (paged keys and values), `kv/memory` (where each
block is), `sequence` and `scheduler/scheduler` (what runs in a step), `step/builder` (a step as arrays),
`runner/runner` (compiled steps), `engine/engine` (the engine loop), `engine/llm` (the public class `LLM`),
`engine/async_llm` (the same for an event loop).

Array names end in their dimensions if code handles more than one shape:

  L layers          T packed tokens of a step    R rows (sequences) of a step   P width of a block table
  B tokens a block  M blocks in the pool         N query heads                  K key/value heads
  G = N / K         H head dim                   D model width                  F feed-forward width
  V vocabulary      S query tiles of a step      Q tokens of a query tile       C cached slots a query can reach
  Gk groups of layers with a block table each

*Block* is a unit of the pool, *slot* one token's place in it, *row* one sequence of a step.
"""

from typing import TYPE_CHECKING

from ksana_jax.lazy import lazy_names

if TYPE_CHECKING:
    from ksana_jax.config import EngineConfig, ModelConfig
    from ksana_jax.engine.async_llm import AsyncLLM
    from ksana_jax.engine.llm import LLM
    from ksana_jax.loading.load import load_model
    from ksana_jax.patterns import AttentionPattern
    from ksana_jax.request import CompletionOutput, Logprob, RequestOutput, SamplingParams
    from ksana_jax.runner.example import StepFunction
    from ksana_jax.step.contract import Part, StepShape

__version__ = "0.1.0"

# Names resolve on first use, so that `import ksana_jax` (and `ksana --help`) does not wait for jax.
_PUBLIC = {
    "ksana_jax.engine.llm": "LLM",
    "ksana_jax.engine.async_llm": "AsyncLLM",
    "ksana_jax.request": "SamplingParams RequestOutput CompletionOutput Logprob",
    "ksana_jax.patterns": "AttentionPattern",
    "ksana_jax.config": "ModelConfig EngineConfig",
    "ksana_jax.loading.load": "load_model",
    "ksana_jax.runner.example": "StepFunction",
    "ksana_jax.step.contract": "StepShape Part",
}
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "RequestOutput", "CompletionOutput", "Logprob", "AttentionPattern"]
__all__ += ["ModelConfig", "EngineConfig", "load_model", "StepFunction", "StepShape", "Part"]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
