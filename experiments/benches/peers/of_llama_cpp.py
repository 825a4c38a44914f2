"""llama.cpp through its C functions: several sequences decoded together. Runs in the peers' environment."""

import ctypes

import llama_cpp
import numpy as np

# Tokens of a call. llama.cpp computes them in pieces of n_ubatch.
BATCH_TOKENS = 2048
KV_TYPES = {"f32": llama_cpp.GGML_TYPE_F32}


@llama_cpp.llama_log_callback
def _silent(level, text, data):
    pass


class Engine:
    """llama.cpp has no engine that takes token ids: a loop of this class submits prompts and decode steps to it.

    The model is a GGUF file, read unchanged for any dtype.

    Prompts come first, as many as a call and the sequences take; then all sequences decode together, one token each.
    Flash attention stays as llama.cpp chooses, on: twice as fast with 32 sequences. It rounds also in float32: 23 of 32
    requests of bench-s have the tokens of ksana_jax, all 32 without it.
    """

    def __init__(self, model: str, dtype: str, threads: int, rows: int, max_model_len: int):
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.use_mmap = False
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), params)
        if not self.model:
            raise RuntimeError("llama.cpp does not load the model")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_seq_max = rows * max_model_len, rows
        context.n_batch, context.n_ubatch = BATCH_TOKENS, 512
        context.n_threads = context.n_threads_batch = threads
        # float32 for equal tokens; otherwise llama.cpp's default, which it reads faster than bfloat16.
        context.type_k = context.type_v = KV_TYPES.get(dtype, llama_cpp.GGML_TYPE_F16)
        context.kv_unified = True  # faster by a tenth to a third with 32 sequences on two cores
        context.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        if not self.context:
            raise RuntimeError("llama.cpp makes no context")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.rows, self.kv = rows, "f32" if dtype == "f32" else "f16"

    def versions(self) -> str:
        return f"llama-cpp-python {llama_cpp.__version__}, prompts and decode steps by llama_decode, KV {self.kv}"

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts]
        waiting, free = list(range(len(prompts)))[::-1], list(range(self.rows))[::-1]
        running: dict[int, int] = {}  # request -> sequence
        while waiting or running:
            chunk: list[tuple[int, list[int], int]] = []  # request, tokens, position of the first
            room = BATCH_TOKENS
            while waiting and free and (not chunk or len(prompts[waiting[-1]]) <= room):
                request = waiting.pop()
                running[request] = free.pop()
                chunk.append((request, prompts[request], 0))
                room -= len(prompts[request])
            if not chunk:
                chunk = [(r, outputs[r][-1:], len(prompts[r]) + len(outputs[r]) - 1) for r in running]
            for request, token in zip((r for r, _, _ in chunk), self._decode(chunk, running), strict=True):
                outputs[request].append(token)
                if len(outputs[request]) == lengths[request]:
                    free.append(running.pop(request))
                    llama_cpp.llama_memory_seq_rm(self.memory, free[-1], -1, -1)
        return outputs

    def _decode(self, chunk: list[tuple[int, list[int], int]], running: dict[int, int]) -> list[int]:
        """Computes tokens of several requests, or any number of one; returns the most probable next token of each."""
        if len(chunk) == 1 and len(chunk[0][1]) > BATCH_TOKENS:
            ((request, tokens, first),) = chunk
            self._decode([(request, tokens[:BATCH_TOKENS], first)], running)
            return self._decode([(request, tokens[BATCH_TOKENS:], first + BATCH_TOKENS)], running)
        batch, i = self.batch, 0
        for request, tokens, first in chunk:
            for position, token in enumerate(tokens, start=first):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = running[request], False
                i += 1
            batch.logits[i - 1] = True
        batch.n_tokens = i
        if status := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returns {status}")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), (len(chunk), self.vocab))
        return logits.argmax(1).tolist()
