"""python -m experiments.peers.transformers_throughput [--model configs/models/bench-s] [--dtype f32|bf16]

Output tokens per second of this engine and of transformers (static and continuous batching) on the workload of
`ksana bench throughput`, turn by turn in one run, on random weights. Needs torch and transformers (extra `parity`).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np


def export_random(config_dir: Path, out: Path, dtype: str) -> None:
    """Random weights for a configuration, as a Hugging Face directory."""
    from ksana_jax.loading import export_hf, load_model

    config, params = load_model(config_dir, dtype=dtype, load_format="dummy", seed=0)
    export_hf(out, config, params)


class Transformers:
    """The peer: one model, two ways of serving."""

    def __init__(self, model_dir: Path, dtype: str):
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(os.cpu_count() or 1)
        self.torch = torch
        kind = torch.float32 if dtype == "f32" else torch.bfloat16
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=kind, attn_implementation="sdpa"
        )
        self.model.eval()

    def static(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """One left-padded batch, generated to the longest output."""
        torch, longest = self.torch, max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(lengths),
                min_new_tokens=max(lengths),
                do_sample=False,
                pad_token_id=0,
            )
        return [row[longest : longest + n].tolist() for row, n in zip(out, lengths, strict=True)]

    def continuous(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Continuous batching with a paged cache."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        generation = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(
            page_size=16,
            num_blocks=800,
            max_batch_tokens=512,
            max_requests_per_batch=32,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
            allow_block_sharing=False,
        )
        manager = self.model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
        manager.start()
        order = [manager.add_request(p, max_new_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
        done: dict[str, list[int]] = {}
        while len(done) < len(order):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
        manager.stop(block=True)
        return [done[name] for name in order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("configs/models/bench-s"))
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    args = parser.parse_args()

    from ksana_jax.bench.throughput import workload
    from ksana_jax.engine.llm import LLM
    from ksana_jax.request import SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder)
        export_random(args.model, model_dir, args.dtype)
        llm = LLM(model_dir, dtype=args.dtype, max_num_seqs=32, max_model_len=512)
        peer = Transformers(model_dir, args.dtype)
    prompts, lengths = workload(llm.model_config.vocab_size, 32, 0)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    llm.warm_up(384)

    def ours(prompts, lengths):
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params[: len(prompts)])
        return [o.outputs[0].token_ids for o in outputs]

    ways = {"ksana_jax": ours, "transformers static": peer.static, "transformers continuous": peer.continuous}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens = {}
    for turn in range(args.repeats + 1):  # the first turn warms up
        for name, way in list(ways.items()):
            started = time.perf_counter()
            try:
                tokens[name] = way(prompts, lengths)
            except Exception as error:  # a peer that fails must not take the measurement along
                if name == "ksana_jax":
                    raise
                print(f"{name} failed: {type(error).__name__}: {error}")
                del ways[name]
                continue
            if turn:
                seconds[name].append(time.perf_counter() - started)
    result = {"dtype": args.dtype, "output_tokens": sum(lengths), "load_1min": round(os.getloadavg()[0], 2)}
    for name in ways:
        rate = sum(lengths) / float(np.median(seconds[name]))
        equal = sum(a == b for a, b in zip(tokens[name], tokens["ksana_jax"], strict=True))
        result[name] = {
            "output_tokens_per_s": round(rate, 1),
            "seconds": [round(s, 2) for s in seconds[name]],
            "requests_with_our_tokens": equal,
        }
        print(f"{name:<26}{rate:>8.0f} output tokens/s   same tokens as ours in {equal} of {len(prompts)}")
    line = json.dumps(result)
    print(line)
    if args.out:
        with args.out.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
