"""Rows on llama.cpp, through llama-cpp-python. See README.md."""

import inspect
import json

import numpy as np
from common import GGUF, HALF, TEXT, WORK, attempted, compared, row, run, token_ids
from llama_cpp import GGML_TYPE_F32, GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, Llama


def log_probs(ids: list[int], name: str = "smollm2", first: int = HALF, **settings) -> np.ndarray:
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


@row
def against_float32():
    exact = json.loads((WORK / "exact.json").read_text())
    yield {"kv": "f16", **compared(scores(token_ids(), first=1024), exact)}


@row
def kv_types():
    exact = scores(token_ids(), first=1024, type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32)[HALF:]
    q8, q4 = ({"type_k": kind, "type_v": kind} for kind in (GGML_TYPE_Q8_0, GGML_TYPE_Q4_0))
    cases = {"f16": {}, "q8_0": q8, "q4_0": q4, "v q4_0, no flash": {"type_v": GGML_TYPE_Q4_0, "flash_attn": False}}
    for kv, given in cases.items():
        yield {"kv": kv, **attempted(lambda: compared(scores(token_ids(), first=1024, **given)[HALF:], exact))}  # noqa: B023


@row
def threads():
    for flash in (True, False):
        one, two = (scores(token_ids(length=HALF + 24), n_threads=n, flash_attn=flash)[HALF:] for n in (1, 2))
        yield {"flash": flash, **compared(two, one)}


@row
def bos():
    ids = token_ids("gemma3-270m", HALF)
    exact = scores([2, *ids], "gemma3-270m", first=1024)[1:]
    for count in (0, 2):
        found = scores([2] * count + ids, "gemma3-270m", first=1024)[-len(exact) :]
        yield {"bos": count, **compared(found, exact)}
    llm = Llama(str(GGUF["gemma3-270m"]), vocab_only=True, verbose=False)
    yield {"prompt": "<bos>The", "ids": llm.tokenize(b"<bos>The", add_bos=True, special=True)}


@row
def defaults():
    """Defaults of a completion, and the probability that its top_k, top_p and min_p cut off at temperature 1."""
    given = {k: p.default for k, p in inspect.signature(Llama.create_completion).parameters.items()}
    p = np.sort(np.exp(log_probs(token_ids(length=256))), -1)[:, : -given["top_k"] - 1 : -1]
    q = p / p.sum(-1, keepdims=True)
    kept = p * (np.cumsum(q, -1) - q < given["top_p"]) * (q >= given["min_p"] * q[:, :1])
    params = Llama(str(GGUF["smollm2"]), verbose=False).context_params
    shown = {k: getattr(params, k) for k in ("n_ctx", "n_threads", "flash_attn_type")}
    shown |= {k: given[k] for k in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")}
    yield {**shown, "never_drawn_percent": float(100 * (1 - kept.sum(-1)).mean())}


if __name__ == "__main__":
    for name, path in GGUF.items():
        ids = Llama(str(path), vocab_only=True, verbose=False).tokenize(TEXT.encode(), add_bos=False)
        (WORK / f"{name}.json").write_text(json.dumps(ids))
    run("llama-cpp-python")
