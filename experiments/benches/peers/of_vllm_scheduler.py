"""vLLM's scheduler without an engine: schedule and update of decode steps. Runs in the peers' environment."""

import os
import statistics
import time

BLOCK_SIZE = 16


class Scheduler:
    """The scheduler of vLLM's V1 engine, synchronous and without statistics, around a model of one layer.

    Args:
      model: directory with a config.json; it is not loaded.
    """

    def __init__(self, model: str):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm

        self.model, self.version = model, vllm.__version__

    def versions(self) -> str:
        return f"vLLM {self.version}"

    def measure(self, rows: int, steps: int, context: int, prefix_cache: bool) -> dict:
        """Returns the median CPU time of decode steps of `rows` requests, and of making a request, in microseconds.

        One step schedules all prompts, whatever their tokens, so that all requests decode from the second one on.
        """
        import numpy as np
        from vllm import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        scheduler = self._scheduler(rows, context, steps, prefix_cache)
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        hasher = get_request_block_hasher(BLOCK_SIZE, hash_fn) if prefix_cache else None
        params, rng = SamplingParams(temperature=0, max_tokens=steps + 2, ignore_eos=True), np.random.default_rng(1)
        params.update_from_generation_config({}, 0)
        adding = []
        for row in range(rows):
            prompt = rng.integers(0, 32_000, max(context - row % BLOCK_SIZE, 1)).tolist()
            began = time.thread_time()
            request = Request(str(row), prompt, params, None, block_hasher=hasher)
            scheduler.add_request(request)
            adding.append(time.thread_time() - began)
        times = []
        for step in range(steps + 1):
            began = time.thread_time()
            output = scheduler.schedule()
            scheduled = time.thread_time() - began
            names = list(output.num_scheduled_tokens)
            ran = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[[7]] * rows,
                prompt_logprobs_dict={},
                pooler_output=[],
            )
            began = time.thread_time()
            scheduler.update_from_output(output, ran)
            updated = time.thread_time() - began
            if len(names) != rows or (step and output.total_num_scheduled_tokens != rows):
                raise RuntimeError(f"step {step} has {len(names)} of {rows} requests: they do not decode together")
            times.append(scheduled + updated)
        return {"step_us": statistics.median(times[1:]) * 1e6, "add_us": statistics.median(adding) * 1e6}

    def _scheduler(self, rows: int, context: int, steps: int, prefix_cache: bool):
        import torch
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.v1.core.sched.scheduler import Scheduler as V1Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        max_model_len = context + steps + BLOCK_SIZE
        model = ModelConfig(
            model=self.model, skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=max_model_len
        )
        num_blocks = rows * -(-max_model_len // BLOCK_SIZE) + 1
        cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=prefix_cache)
        cache.num_gpu_blocks = num_blocks
        config = VllmConfig(
            model_config=model,
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=rows,
                max_num_batched_tokens=rows * context,
                max_model_len=max_model_len,
                enable_chunked_prefill=True,
                async_scheduling=False,
                is_encoder_decoder=False,
            ),
        )
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        return V1Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )
