"""Writes the weights that RocketKV's authors give to blocks: rocketkv.json, which tests/methods/selection/ reads.

Needs torch and gpt-fast/rocket.py of https://github.com/NVlabs/RocketKV (made with commit 63637c8), whose licence
allows research; nothing of it is stored here:

    PYTHONPATH=RocketKV/gpt-fast python tests/golden/make_rocketkv.py
"""

import json
from pathlib import Path

import numpy as np
import rocket  # pyright: ignore[reportMissingImports]
import torch

KV_HEADS, GROUP, HEAD_DIM, BLOCKS, SIZE = 2, 3, 8, 6, 4


def weights(seed: int, top_r: int) -> list[list[float]]:
    """Returns the mean weight over heads of all tokens of a block together: [K, P]."""
    rng = np.random.RandomState(seed)
    q = torch.tensor(rng.uniform(-3, 3, (KV_HEADS, GROUP, HEAD_DIM)))
    k = torch.tensor(rng.uniform(-3, 3, (BLOCKS, KV_HEADS, SIZE, HEAD_DIM)))
    bounds = torch.cat([k.amin(2), k.amax(2)], dim=-1).transpose(0, 1)[None]
    keys = k.transpose(0, 1).reshape(1, KV_HEADS, BLOCKS * SIZE, HEAD_DIM)
    found, topk = [], torch.topk

    def recording(x, *args, **kwargs):
        found.append(x)
        return topk(x, *args, **kwargs)

    rocket.torch.topk = recording
    mask, chosen = torch.ones(1, 1, 1, BLOCKS * SIZE, dtype=torch.bool), rocket.RocketArgs()
    queries = q.reshape(1, KV_HEADS * GROUP, 1, HEAD_DIM)
    rocket.rocket_attn(queries, bounds, keys, keys, mask, SIZE, top_r, SIZE, chosen)
    rocket.torch.topk = topk
    of_tokens = found[1].reshape(KV_HEADS, BLOCKS, SIZE) / GROUP
    return np.round(of_tokens.sum(-1).numpy(), 12).tolist()


if __name__ == "__main__":
    cases = [{"seed": seed, "top_r": top_r} for seed, top_r in enumerate((8, 5, 4, 1))]
    lines = (json.dumps(case | {"weights": weights(**case)}) for case in cases)
    (Path(__file__).parent / "rocketkv.json").write_text("[" + ",\n".join(lines) + "]\n")
