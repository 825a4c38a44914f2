"""Decode with blocks of 16: ours next to jax's kernel and cuDNN's."""

from __future__ import annotations

from experiments.gpu.candidates import jax_peers, ours
from experiments.gpu.cases import decode_cases
from experiments.gpu.context import Context
from experiments.gpu.race import Entry, race


def run(context: Context) -> None:
    entries = [
        Entry(case, [*ours(case), *jax_peers(case, stages=((3, 64),))]) for case in decode_cases(16, context.tiny)
    ]
    race(context, "decode, blocks of 16", entries)
