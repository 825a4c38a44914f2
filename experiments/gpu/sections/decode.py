"""Decode, the seven shapes with blocks of 64: ours beside all peers, in the same rounds."""

from __future__ import annotations

from experiments.gpu.candidates import jax_peers, ours
from experiments.gpu.cases import decode_cases
from experiments.gpu.context import Context
from experiments.gpu.peer import TorchPeer
from experiments.gpu.race import Entry, race

TORCH = ("torch SDPA flash (dense)", "torch SDPA cuDNN (dense)", "FlashInfer", "FlashAttention 3", "vLLM Triton")
# Each shape costs FlexAttention a compilation of many seconds.
FLEX_ON = ("64x4k", "2x100")


def run(context: Context) -> None:
    peer = TorchPeer(context)
    peer.start()
    entries = []
    for case in decode_cases(64, context.tiny):
        kinds = [*TORCH, *(["torch FlexAttention (dense)"] if case.name in FLEX_ON else [])]
        entries.append(Entry(case, [*ours(case), *jax_peers(case)], kinds))
    try:
        race(context, "decode, blocks of 64", entries, peer=peer, compile_s=context.left() * 0.4)
    finally:
        peer.close()
