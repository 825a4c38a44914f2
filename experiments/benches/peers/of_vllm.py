"""vLLM's engine in this process, for CPUs. Runs in the peers' environment."""

import os


class Engine:
    """vLLM without compilation of graphs, prefix cache, tokenizer and other processes."""

    def __init__(self, model: str, dtype: str, threads: int, rows: int, max_model_len: int):
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        }
        import torch
        import vllm

        self.vllm = vllm
        self._versions = f"vLLM {vllm.__version__}, torch {torch.__version__}, eager"
        self.llm = vllm.LLM(
            model=model,
            dtype={"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[dtype],
            max_model_len=max_model_len,
            max_num_seqs=rows,
            enforce_eager=True,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            seed=0,
        )

    def versions(self) -> str:
        return self._versions

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [
            self.vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths
        ]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
