"""transformers: one left-padded batch, and continuous batching with a paged cache. Runs in the peers' environment."""

import torch
import transformers


class Static:
    """One left-padded batch, generated to the longest output."""

    def __init__(self, model: str, dtype: str, threads: int, rows: int, max_model_len: int):
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=kind, attn_implementation="sdpa")
        self.model.eval()
        self.rows, self.max_model_len = rows, max_model_len

    def versions(self) -> str:
        return f"transformers {transformers.__version__}, torch {torch.__version__}, sdpa"

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        count = max(lengths)
        settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, **settings)
        return [row[longest : longest + n].tolist() for row, n in zip(out, lengths, strict=True)]


class Continuous(Static):
    """Continuous batching; its thread runs only while it is measured."""

    def prepare(self) -> None:
        # The sizes of the cache are inferred from a GPU's memory if they are not given.
        batching = transformers.ContinuousBatchingConfig(
            page_size=16,
            num_blocks=self.rows * -(-self.max_model_len // 16),
            max_batch_tokens=512,
            max_requests_per_batch=self.rows,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
            allow_block_sharing=False,
        )
        generation = transformers.GenerationConfig(
            max_new_tokens=self.max_model_len, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        self.manager = self.model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        self.manager.start()

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        order = [self.manager.add_request(p, max_new_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
        done: dict[str, list[int]] = {}
        while len(done) < len(order):
            result = self.manager.get_result(timeout=1)
            if result is None and not self.manager.is_running():
                raise RuntimeError("continuous batching stopped before all requests had ended")
            if result is not None and result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
        return [done[name] for name in order]

    def finish(self) -> None:
        self.manager.stop(block=True)
