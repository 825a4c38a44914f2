"""A step of 64 decodes next to a chunk of 512 tokens, as the engine runs it: one kernel after the other.

The floor of the decodes is their bytes at the copy bandwidth, that of the chunk its operations at the matmul's rate.
"""

from __future__ import annotations

import dataclasses

from experiments.gpu.candidates import ours
from experiments.gpu.cases import Case
from experiments.gpu.context import Context
from experiments.gpu.race import Entry, race

BAR = 1.25  # times the sum of the floors


def run(context: Context) -> None:
    decodes = Case("64 decodes at 2k", (2048,) * 64, 64)
    chunk = Case("chunk of 512 at 4k", (4096,), 64, queries=512)
    if context.tiny:
        small = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "tiny": True}
        decodes = dataclasses.replace(decodes, lengths=(100,) * 3, **small)
        chunk = dataclasses.replace(chunk, lengths=(120,), queries=40, **small)
    measured = race(
        context,
        "mixed",
        [Entry(case, ours(case)) for case in (decodes, chunk)],
        work=lambda case: {"bytes": case.bytes, "flops": case.flops},
    )
    best = {}
    for case in (decodes, chunk):
        times = {who: t for (name, who, mode), t in measured.items() if name == case.name and mode == "chained"}
        if not times:
            return
        best[case.name] = min(times.items(), key=lambda item: item[1])
    ceilings = {r["metric"]: r["value"] * 1e12 for r in context.past("value", section="ceilings")}
    copy, matmul = ceilings.get("copy bandwidth"), ceilings.get("matmul")
    together = sum(t for _, t in best.values())
    who = " + ".join(name for name, _ in best.values())
    context.value(f"mixed: {decodes.name}, then {chunk.name}, {who}", together * 1e6, "us")
    if copy and matmul:
        floor = decodes.bytes / copy + max(chunk.flops / matmul, chunk.bytes / copy)
        context.value(f"mixed: {who}", together / floor, "x the sum of the floors", bar=BAR)
