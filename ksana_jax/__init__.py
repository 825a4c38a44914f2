"""A research engine for KV-cache memory and scheduling in LLM inference.

Files in the order in which a greedy request enters them on a CPU; `examples/one_request.py` has the loop in one page:

  call      `core/request` (sampling parameters), `engine/llm` (`LLM.generate`), `engine/prompts` (texts, token ids),
            `engine/engine` (requests), `engine/request_factory` (checks of requests)
  schedule  `scheduler/sequence` (the rows of a step), `engine/completion` (output), `engine/engine_lock` (one thread at
            a time), `scheduler/waiting` (admission), `scheduler/scheduler` (what runs in a step), `engine/steps` (the
            loop over steps), `scheduler/running` (budget and preemption), `kv/block_manager` (free blocks),
            `scheduler/row_blocks` (block tables), `kv/memory` (where blocks are)
  build     `scheduler/step/builder` (a step as arrays), `scheduler/step/buckets` (their sizes)
  run       `runner/runner` (compiled steps), `runner/transfer` (one transfer each way), `runner/network` (layers),
            `models/transformer`, `models/rope`, `ops/paged` (attention in one layer), `native/operators` (in C++),
            `models/operators` (heads), `ops/kernels`, `ops/pool` (keys and values), `native/kernel` (attention),
            `sampling/sampler` (the next token)

`core/config` (settings) and `engine/build` (the parts of an engine) come before the first request. `engine/async_llm`
is `LLM` for an event loop. `kv/layout` says what a block holds, `core/patterns` which positions a query attends to, and
`ops/attention` what attention computes.

Array names end in their dimensions if code handles more than one shape:

  L layers          T packed tokens of a step    R rows (sequences) of a step   P width of a block table
  B tokens a block  M blocks in the pool         N query heads                  K key/value heads
  G = N / K         H head dim                   D model width                  F feed-forward width
  V vocabulary      S query tiles of a step      Q tokens of a query tile       C cached slots a query can reach
  Gk groups of layers with a block table each

*Block* is a unit of the pool, *slot* one token's place in it, *row* one sequence of a step.
"""

from typing import TYPE_CHECKING, Any

from ksana_jax.core.lazy import lazy_names

if TYPE_CHECKING:
    from ksana_jax.core.config import EngineConfig, ModelConfig
    from ksana_jax.core.lora import LoRARequest
    from ksana_jax.core.outputs import CompletionOutput, Logprob, RequestOutput
    from ksana_jax.core.patterns import AttentionPattern
    from ksana_jax.core.pooling import EmbeddingRequestOutput, PoolingParams
    from ksana_jax.core.request import SamplingParams
    from ksana_jax.core.structured_outputs import StructuredOutputsParams
    from ksana_jax.engine.async_llm import AsyncLLM
    from ksana_jax.engine.llm import LLM
    from ksana_jax.loading.load import load_model
    from ksana_jax.methods.steering import Steering
    from ksana_jax.runner.example import StepFunction
    from ksana_jax.scheduler.step.types import StepShape, TileGroup

    run: Any  # lab.runs.result, which imports this module

__version__ = "0.1.0"

# Names resolve on first use, so that `import ksana_jax` (and `ksana --help`) does not wait for jax.
_PUBLIC = {
    "ksana_jax.engine.llm": "LLM",
    "ksana_jax.engine.async_llm": "AsyncLLM",
    "ksana_jax.core.request": "SamplingParams",
    "ksana_jax.core.pooling": "PoolingParams EmbeddingRequestOutput",
    "ksana_jax.core.structured_outputs": "StructuredOutputsParams",
    "ksana_jax.core.outputs": "RequestOutput CompletionOutput Logprob",
    "ksana_jax.core.lora": "LoRARequest",
    "ksana_jax.core.patterns": "AttentionPattern",
    "ksana_jax.core.config": "ModelConfig EngineConfig",
    "ksana_jax.loading.load": "load_model",
    "ksana_jax.methods.steering": "Steering",
    "ksana_jax.runner.example": "StepFunction",
    "ksana_jax.scheduler.step.types": "StepShape TileGroup",
    "ksana_jax.lab.runs.result": "run",
}
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "RequestOutput", "CompletionOutput", "Logprob", "AttentionPattern"]
__all__ += ["LoRARequest", "Steering", "ModelConfig", "EngineConfig", "load_model", "StepFunction", "StepShape"]
__all__ += ["TileGroup", "StructuredOutputsParams", "PoolingParams", "EmbeddingRequestOutput", "run"]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
