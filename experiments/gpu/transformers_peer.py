"""transformers' continuous batching: reads a task as JSON, prints a JSON line for each way of serving. Needs torch."""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig

CUDA = torch.cuda.is_available()
# Ways of serving, the one expected to be fastest first. "auto" leaves the choice to transformers.
WAYS = {
    "graphs, asynchronous": {"use_cuda_graph": True, "use_async_batching": True},
    "auto": {},
    "graphs": {"use_cuda_graph": True, "use_async_batching": False},
    "plain": {"use_cuda_graph": False, "use_async_batching": False},
}


def serve(model, prompts: list[list[int]], lengths: list[int], until: float, options: dict) -> list[float]:
    """Seconds of each repeat, the first of them a warm-up that is left out where there is time for more."""
    generation = GenerationConfig(max_new_tokens=max(lengths), do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=16,
        num_blocks=max(40 * len(prompts), 256),
        max_batch_tokens=1024,
        allow_block_sharing=False,
        max_requests_per_batch=len(prompts),
        **options,
    )
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
    manager.start()
    seconds: list[float] = []
    try:
        for _ in range(3):
            if seconds and time.monotonic() + 1.2 * seconds[-1] > until:
                break
            started = time.perf_counter()
            names = {manager.add_request(p, max_new_tokens=n) for p, n in zip(prompts, lengths, strict=True)}
            while names:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    names.discard(result.request_id)
                    if result.error:
                        raise RuntimeError(result.error)
                if time.monotonic() > until:
                    raise TimeoutError(f"{len(names)} requests were unfinished when the time was up")
            seconds.append(time.perf_counter() - started)
    finally:
        manager.stop(block=True, timeout=5)
    return seconds[1:] or seconds


def main() -> None:
    task = json.loads(sys.stdin.readline())
    until = time.monotonic() + task["ends_in_s"]
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    with torch.device("cuda" if CUDA else "cpu"):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**task["config"]), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.eval()
    for way, options in (WAYS if CUDA else {"plain": WAYS["plain"]}).items():
        if time.monotonic() > until - 5:
            break
        try:
            with torch.inference_mode():
                seconds = serve(model, task["prompts"], task["lengths"], until, options)
            print(json.dumps({"way": way, "seconds": seconds}), flush=True)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            print(json.dumps({"way": way, "error": f"{type(error).__name__}: {lines[0][:300]}"}), flush=True)


if __name__ == "__main__":
    main()
