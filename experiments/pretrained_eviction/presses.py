"""Perplexity after compressed contexts of SmolLM2-135M, by the engine and by kvpress, on the same tokens.

    python -m experiments.pretrained_eviction.presses ours runs/presses.json        in the environment of the project
    python experiments/pretrained_eviction/presses.py theirs runs/presses.json      in one with kvpress

The second needs `pip install kvpress==0.5.5 torch==2.13.0 'transformers<5.3' gguf`. Both read the same GGUF file and
decode it to float32, compress the first CONTEXT tokens of an excerpt once, and read the rest with the tokens that are
left. The first command writes tokens and its perplexities; the second adds its own and prints both.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

CONTEXT, LENGTH, SEEDS = 1536, 2048, (0, 1, 2)
BUDGETS = (0.1, 0.25, 0.5, 0.75)  # of the context
# A press, its arguments, and the same method of ours: see docs/reference/eviction.md.
METHODS = (
    ("SnapKVPress", {"window_size": 32, "kernel_size": 5}, {"method": "snapkv", "recent": 32, "kernel": 5}),
    ("TOVAPress", {}, {"method": "tova", "recent": 1}),
    ("ObservedAttentionPress", {}, {"method": "h2o", "normalised": True, "recent": 0}),
    ("KnormPress", {}, {"method": "knorm"}),
    ("KeyDiffPress", {}, {"method": "keydiff"}),
    ("LagKVPress", {"n_sink": 4, "lag_size": 128}, {"method": "lagkv", "sinks": 4, "lag_size": 128}),
    ("StreamingLLMPress", {"n_sink": 4}, {"method": "streaming_llm", "positions": "absolute", "sinks": 4}),
)


def perplexity(log_probs: list[float]) -> float:
    return math.exp(-math.fsum(log_probs) / len(log_probs))


def ours() -> dict:
    from ksana_jax import LLM
    from ksana_jax.core.sources import model_path
    from ksana_jax.lab.runs.asking import token_scores
    from ksana_jax.lab.runs.texts import ExcerptSpec, draw_excerpts

    def scored(llm: LLM) -> list[float]:
        asked = [{"prompt_token_ids": ids[:CONTEXT], "question_token_ids": ids[CONTEXT:]} for ids in excerpts]
        return [perplexity([s.logprob for s in found][CONTEXT - 1 :]) for found in token_scores(llm, asked)]

    def engine(**eviction) -> LLM:
        return LLM("smollm2", max_model_len=LENGTH + 1, max_num_batched_tokens=256, max_num_seqs=1, **eviction)

    excerpts, rows = [], []
    plain = engine()
    for seed in SEEDS:
        excerpts += [e.ids for e in draw_excerpts(["python-docs"], plain.tokenizer, 1, ExcerptSpec(LENGTH, True), seed)]
    rows.append({"press": None, "budget": CONTEXT, "ours": scored(plain)})
    for (press, _, settings), fraction in ((m, b) for m in METHODS for b in BUDGETS):
        budget = kept(fraction)
        llm = engine(kv_eviction={**settings, "budget": budget, "interval": 1, "prompts": "once"})
        rows.append({"press": press, "budget": budget, "ours": scored(llm)})
        print(press, budget, *(f"{value:.3f}" for value in rows[-1]["ours"]), flush=True)
    return {"gguf": str(model_path("smollm2")), "excerpts": excerpts, "rows": rows}


def kept(fraction: float) -> int:
    """Returns the tokens that kvpress keeps of a context."""
    return int(CONTEXT * fraction)


def theirs(found: dict) -> None:
    import kvpress  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, DynamicCache  # pyright: ignore[reportMissingImports]

    gguf = Path(found["gguf"])
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    arguments = {press: given for press, given, _ in METHODS}

    @torch.no_grad()
    def scored(press, ids: list[int]) -> float:
        context, rest = torch.tensor([ids[:CONTEXT]]), torch.tensor([ids[CONTEXT:]])
        cache = DynamicCache()
        if press is None:
            first = model(context, past_key_values=cache).logits[:, -1:]
        else:
            with press(model):
                first = model(context, past_key_values=cache).logits[:, -1:]
        # Every kept token is visible, and of the rest those before: what is kept has no order any more.
        size, before = rest.shape[1], cache.get_seq_length()
        mask = torch.full((size, size), torch.finfo(torch.float32).min).triu(1)
        mask = torch.cat([torch.zeros(size, before), mask], dim=1)[None, None]
        positions = torch.arange(CONTEXT, len(ids))[None]
        after = model(rest, past_key_values=cache, attention_mask=mask, position_ids=positions).logits[:, :-1]
        log_probs = torch.cat([first, after], dim=1).double().log_softmax(-1)[0]
        return perplexity(log_probs.gather(1, rest[0][:, None])[:, 0].tolist())

    for row in found["rows"]:
        press = None
        if row["press"] is not None:
            ratio = 1 - (row["budget"] + 0.5) / CONTEXT  # which kvpress rounds down to the budget
            press = getattr(kvpress, row["press"])(compression_ratio=ratio, **arguments[row["press"]])
        row["theirs"] = [scored(press, ids) for ids in found["excerpts"]]
        pairs = zip(row["ours"], row["theirs"], strict=True)
        print(row["press"], row["budget"], *(f"{a:.3f}/{b:.3f}" for a, b in pairs), flush=True)


if __name__ == "__main__":
    side, path = sys.argv[1], Path(sys.argv[2])
    if side == "ours":
        written = ours()
    else:
        theirs(written := json.loads(path.read_text()))
    path.write_text(json.dumps(written))
