"""A window of 1k and 4 sinks at 32k of text, against a text of 1k: time must follow what is seen."""

from __future__ import annotations

import dataclasses

from experiments.gpu.candidates import ours
from experiments.gpu.cases import Case
from experiments.gpu.context import Context
from experiments.gpu.peer import TorchPeer
from experiments.gpu.race import Entry, race
from pallas_kernels.patterns import Pattern

BAR = 1.3


def run(context: Context) -> None:
    peer = TorchPeer(context)
    peer.start()
    sizes = ((3, 256, 64),) if context.tiny else ((64, 32768, 1024), (8, 32768, 1024))
    entries, pairs = [], []
    for rows, text, window in sizes:
        base = Case(f"{rows} rows of {window}", (window,) * rows, 64)
        if context.tiny:
            base = dataclasses.replace(base, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, tiny=True)
        pattern = tuple(Pattern(window=window, num_sinks=4))
        far = dataclasses.replace(
            base, name=f"{rows} rows of {text}, window {window} + 4 sinks", lengths=(text,) * rows, pattern=pattern
        )
        pairs.append((base, far))
        flex = ["torch FlexAttention (dense)"] if rows == sizes[-1][0] else []
        entries += [Entry(case, ours(case), flex if case is far else []) for case in (base, far)]
    try:
        measured = race(context, "window", entries, peer=peer)
    finally:
        peer.close()
    for base, far in pairs:
        for case, name, mode in list(measured):
            if case != far.name or mode != "chained" or (base.name, name, mode) not in measured:
                continue
            ratio = measured[far.name, name, "chained"] / measured[base.name, name, "chained"]
            context.value(f"window: {far.name} against {base.name}, {name}", ratio, "x", bar=BAR)
