"""Decode, the seven shapes with blocks of 64: ours next to all peers in the same rounds, in parts, and tuned."""

from __future__ import annotations

from experiments.gpu.candidates import Candidate, implementations, jax_peers, ours, ours_as
from experiments.gpu.cases import Case, decode_cases
from experiments.gpu.context import Context
from experiments.gpu.parts import on_this_device
from experiments.gpu.peer import TorchPeer
from experiments.gpu.race import Entry, race

TORCH = ("torch SDPA flash (dense)", "torch SDPA cuDNN (dense)", "FlashInfer", "FlashAttention 3", "vLLM Triton")
# Each shape costs FlexAttention a compilation of many seconds.
FLEX_ON = ("64x4k", "2x100")
# Attention alone and the merge alone: where long texts, a single one, and many short ones spend their time.
PARTS_ON = ("64x4k", "1x32k", "256x512")
# (stages, workers) of the Hopper kernel: what is in flight, and how many blocks of threads. Four stages and more leave
# room for one block on a multiprocessor of 132.
TUNING = ((2, 264), (2, 396), (4, 132), (5, 132))
TUNED = "64x4k"


def run(context: Context) -> None:
    peer = TorchPeer(context)
    peer.start()
    cases = decode_cases(64, context.tiny)
    entries = []
    for case in cases:
        kinds = [*TORCH, *(["torch FlexAttention (dense)"] if case.name in FLEX_ON else [])]
        parts = on_this_device(case) if case.name in PARTS_ON else []
        entries.append(Entry(case, [*ours(case), *jax_peers(case), *parts], kinds))
    try:
        measured = race(context, "decode, blocks of 64", entries, peer=peer)
    finally:
        peer.close()
    for (case, who, mode), seconds in measured.items():
        if mode == "part":
            context.value(f"decode, {case}: {who}", seconds * 1e6, "us")
    tune(context, next((c for c in cases if c.name == TUNED), cases[0]))


def tune(context: Context, case: Case) -> None:
    """Other stages and workers of the Hopper kernel on one shape; without a GPU the reference as often."""
    candidates = sweep(case)
    measured = race(context, "tuning", [Entry(case, candidates)])
    times = {who: seconds for (_, who, mode), seconds in measured.items() if mode == "chained"}
    if times:
        best = min(times, key=lambda who: times[who])
        context.value(f"tuning, {case.name}: best is {best}", times[best] * 1e6, "us")


def sweep(case: Case) -> list[Candidate]:
    """`hopper_decode` with each of TUNING's pairs."""
    found = implementations()
    kernel = found.get("hopper_decode")
    return [
        ours_as(
            f"hopper, {stages} stages, {workers} workers",
            kernel.tuned(stages=stages, num_workers=workers) if kernel else found["reference"],
            case,
        )
        for stages, workers in TUNING
    ]
