"""llama.cpp with grammars for `speed`: a line of settings on stdin, then one for each run: true with a grammar.

The grammar sampler reads the most probable token first, and the whole vocabulary only if its grammar forbids that one,
as llama.cpp's `common_sampler_sample` does.
"""

import ctypes
import json
import math
import sys
import time
from pathlib import Path

import llama_cpp
from llama_cpp.llama_grammar import json_schema_to_gbnf

sys.path.insert(0, str(Path(__file__).parents[1] / "benches/peers"))
from of_llama_cpp import Engine


class Constrained(Engine):
    """Decodes with a grammar for each request; times steps without prompts."""

    def start(self, grammar: str | None, count: int) -> None:
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        text = (grammar or "").encode()
        self.samplers = [llama_cpp.llama_sampler_init_grammar(vocab, text, b"root") for _ in range(count) if grammar]
        self.wall_s = self.cpu_s = 0.0

    def _decode(self, chunk, running):
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = super()._decode(chunk, running)
        if self.samplers:
            tokens = [self._allowed(i, request, token) for i, ((request, *_), token) in enumerate(zip(chunk, tokens))]
        if len(chunk[0][1]) == 1:
            self.wall_s += time.perf_counter() - wall
            self.cpu_s += time.process_time() - cpu
        return tokens

    def _allowed(self, i: int, request: int, token: int) -> int:
        sampler, logits = self.samplers[request], llama_cpp.llama_get_logits(self.context)
        for ids in ((token,), range(self.vocab)):
            data = (llama_cpp.llama_token_data * len(ids))(*((t, logits[i * self.vocab + t], 0) for t in ids))
            candidates = llama_cpp.llama_token_data_array(data=data, size=len(ids), selected=-1, sorted=False)
            llama_cpp.llama_sampler_apply(sampler, ctypes.byref(candidates))
            found = max(data, key=lambda entry: entry.logit) if len(ids) > 1 else data[0]
            if found.logit > -math.inf:
                break
        llama_cpp.llama_sampler_accept(sampler, found.id)
        return found.id


given = json.loads(sys.stdin.readline())
prompts, lengths = given["prompts"], given["lengths"]
engine = Constrained(given["path"], "bf16", given["threads"], len(prompts), 512)
gbnf, model = json_schema_to_gbnf(json.dumps(given["schema"]), [*given["schema"]["properties"]]), engine.model
print(json.dumps(engine.versions()), flush=True)
for line in sys.stdin:
    engine.start(gbnf if json.loads(line) else None, len(prompts))
    outputs = engine.generate(prompts, lengths)
    for sampler in engine.samplers:
        llama_cpp.llama_sampler_free(sampler)
    print(json.dumps({"outputs": outputs, "wall_s": engine.wall_s, "cpu_s": engine.cpu_s}), flush=True)
