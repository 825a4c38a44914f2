"""Rows on llama.cpp, by llama-cpp-python. With `tokens` after the folder it writes token ids alone. See README.md."""

import inspect
import json
import sys

import numpy as np
from common import GGUF, HALF, LENGTH, TEXT, WORK, compared, run, token_ids
from llama_cpp import GGML_TYPE_F32, GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, Llama


def log_probs(ids: list[int], name: str = "smollm2", first: int = LENGTH, **settings) -> np.ndarray:
    """Returns log-probabilities [T, V]; tokens after `first` are computed one at a time, as in decoding."""
    settings = {"n_threads": 1, "n_threads_batch": 1, "n_ctx": 1200, "flash_attn": True, **settings}
    llm = Llama(str(GGUF[name]), logits_all=True, verbose=False, **settings)
    for part in (ids[:first], *([token] for token in ids[first:])):
        llm.eval(part)
    logits = llm.scores[: len(ids)].astype(np.float64)
    llm.close()
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


def scores(ids: list[int], *args, **settings) -> list[float]:
    """Returns the log-probabilities of all tokens but the first."""
    return log_probs(ids, *args, **settings)[range(len(ids) - 1), ids[1:]].tolist()


def rows():
    yield "against_float32", compared(scores(token_ids()), json.loads((WORK / "exact.json").read_text()))
    base = scores(token_ids())[HALF:]
    f32, q8, q4 = ({"type_k": t, "type_v": t} for t in (GGML_TYPE_F32, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0))
    no_flash = {"flash_attn": False}
    cases = {"f32": f32, "f16, no flash": no_flash, "f32, no flash": {**f32, **no_flash}, "q8_0": q8, "q4_0": q4}
    for kv, given in cases.items():
        yield "kv_types", {"kv": kv, "against": "f16", **compared(scores(token_ids(), **given)[HALF:], base)}
    for flash in (True, False):
        ids = token_ids(length=HALF + 24)
        one, two = (scores(ids, first=HALF, n_threads=n, flash_attn=flash)[HALF:] for n in (1, 2))
        yield "threads", {"flash": flash, **compared(two, one)}
    ids = token_ids("gemma3-270m", HALF)
    exact = scores([2, *ids], "gemma3-270m")[1:]
    for count in (0, 2):
        yield "bos", {"bos": count, **compared(scores([2] * count + ids, "gemma3-270m")[-len(exact) :], exact)}
    llm = Llama(str(GGUF["gemma3-270m"]), vocab_only=True, verbose=False)
    yield "bos", {"prompt": "<bos>The", "ids": llm.tokenize(b"<bos>The", add_bos=True, special=True)}
    # Defaults of a completion, and the probability that its top_k, top_p and min_p cut off at temperature 1.
    given = {k: p.default for k, p in inspect.signature(Llama.create_completion).parameters.items()}
    p = np.sort(np.exp(log_probs(token_ids(length=256))), -1)[:, : -given["top_k"] - 1 : -1]
    q = p / p.sum(-1, keepdims=True)
    kept = p * (np.cumsum(q, -1) - q < given["top_p"]) * (q >= given["min_p"] * q[:, :1])
    params = Llama(str(GGUF["smollm2"]), verbose=False).context_params
    shown = {k: getattr(params, k) for k in ("n_ctx", "n_threads", "flash_attn_type")}
    shown |= {k: given[k] for k in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")}
    yield "defaults", {**shown, "never_drawn_percent": float(100 * (1 - kept.sum(-1)).mean())}


if __name__ == "__main__":
    for name, path in GGUF.items():
        tokens = Llama(str(path), vocab_only=True, verbose=False).tokenize(TEXT.encode(), add_bos=False)
        (WORK / f"{name}.json").write_text(json.dumps(tokens))
    run(() if "tokens" in sys.argv else rows(), "llama-cpp-python")
