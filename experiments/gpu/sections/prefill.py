"""A causal prefill of 8k tokens, in TFLOP/s; ours in tiles of several sizes."""

from __future__ import annotations

import dataclasses

import jax

from experiments.gpu.candidates import TOKAMAX, Candidate, jax_peers, ours, tokamax_prefill
from experiments.gpu.cases import Case
from experiments.gpu.context import Context
from experiments.gpu.peer import TorchPeer
from experiments.gpu.race import Entry, race

BAR_TFLOPS = 450.0
TORCH = ("torch SDPA flash (dense)", "torch SDPA cuDNN (dense)", "torch FlexAttention (dense)")


def run(context: Context) -> None:
    peer = TorchPeer(context)
    peer.start()
    length = 96 if context.tiny else 8192
    base = Case(f"causal {length}", (length,), 64, prefill=True)
    if context.tiny:
        base = dataclasses.replace(base, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, tiny=True)
    entries = []
    tiles = (16, 32) if context.tiny else (128, 64, 32)
    for tile in tiles:
        case = dataclasses.replace(base, name=f"{base.name}, tiles of {tile}", queries=tile)
        first = tile == tiles[0]
        entries.append(Entry(case, [*ours(case), *(_peers(context, case) if first else [])], TORCH if first else ()))
    try:
        measured = race(
            context,
            "prefill",
            entries,
            peer=peer,
            calls=2 if context.tiny else 10,
            work=lambda case: {"bytes": case.bytes, "flops": case.flops},
        )
    finally:
        peer.close()
    own = {c.name for c in ours(base)}
    rates = {key: base.flops / t / 1e12 for key, t in measured.items() if key[1] in own and key[2] == "chained"}
    if rates:
        (case, who, _), rate = max(rates.items(), key=lambda item: item[1])
        context.value(f"prefill: {case}, {who}", rate, "TFLOP/s", bar=BAR_TFLOPS, most=False)


def _peers(context: Context, case: Case) -> list[Candidate]:
    """jax's own, and tokamax's kernel, or why it takes no part."""
    try:
        if jax.default_backend() != "gpu":
            raise NotImplementedError("its kernel is for GPUs")
        return [*jax_peers(case), tokamax_prefill(case)]
    except NotImplementedError as error:
        context.failed(f"{TOKAMAX} on {case.name}", error, who=TOKAMAX, case=case.name)
        return jax_peers(case)
