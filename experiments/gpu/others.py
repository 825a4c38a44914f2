"""Kernels that others have timed on the same chips and shapes, next to ours: where ours is behind. No jax."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).with_name("others.json")
# A large copy on an H200, read and written bytes together: the mean of two runs.
COPY_BYTES_PER_S = 3.95e12
# Keys and values of a token: 8 heads of 128 in 16 bits.
TOKEN_BYTES = 2 * 8 * 128 * 2
TOKENS = {"64x8k": 64 * 8192, "256x512": 256 * 512, "1x32k": 32_768, "32x4k": 32 * 4096}
# Metric and case of our record of each decode. Our 64x8k has 8,448 tokens a row: rates are compared, not times.
DECODES = {
    "64x8k": ("shared prefix", "64 rows of 8448, nothing shared"),
    **{case: ("decode, blocks of 64", case) for case in ("32x4k", "256x512", "1x32k")},
}
PREFILL, CODES = "prefill, causal 8k", "64x8k, 8 bits"


class Best(NamedTuple):
    """Other projects' best figure. value: microseconds, share of a bandwidth, TFLOP/s, or time relative to 16 bits."""

    value: float
    who: str


def read() -> dict[str, Any]:
    """Returns "source", "data_sheet_bytes_per_s" by device, and "kernels"."""
    return json.loads(PATH.read_text())


def best(device: str, case: str, figure: str) -> Best | None:
    """Returns the best of a case's figures, the least "us" or "of_16_bits", the most "share" or "tflops"; or None."""
    found = [
        Best(kernel[figure], kernel["who"])
        for kernel in read()["kernels"]
        if (kernel["device"], kernel["case"]) == (device, case) and figure in kernel
    ]
    return (max if figure in ("share", "tflops") else min)(found, default=None)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: ours, the best of other projects on an H200, and how much longer ours takes."""
    copy = COPY_BYTES_PER_S
    h100 = read()["data_sheet_bytes_per_s"]["H100"] / 1e12
    lines = [
        f"| H200 | ours | measured by others | ours takes | measured by others on an H100, of {h100:g} TB/s |",
        "|---|---:|---|---:|---|",
    ]

    def mine(*named: str) -> Mapping[str, Any]:
        """The record of a metric, a case and a name."""
        times = (r for r in records if r["kind"] == "time" and r["mode"] == "chained")
        return next(r for r in times if (r["metric"], r["case"], r["who"]) == named)

    for case, of_record in DECODES.items():
        found, theirs, there = mine(*of_record, "hopper_decode"), best("H200", case, "us"), best("H100", case, "share")
        assert theirs is not None
        rate, their_rate = found["bytes"] / found["us"] * 1e6, TOKENS[case] * TOKEN_BYTES / theirs.value * 1e6
        cells = [
            f"decode {case}" + ", ours of 8,448 tokens a row" * (case == "64x8k"),
            f"{found['us']:.1f} us, {rate / copy:.0%} of copy",
            f"{theirs.value:g} us, {their_rate / copy:.0%}: {theirs.who}",
            f"{their_rate / rate:.2f}",
            f"{there.value:.0%}: {there.who}" if there else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    whole, theirs = mine("quantised", "64x4k", "hopper_decode"), best("H200", CODES, "of_16_bits")
    assert theirs is not None
    for kind in ("int8", "e4m3"):
        found = mine("quantised", "64x4k", f"hopper_decode, {kind}")
        part = found["us"] / whole["us"]
        cells = [f"decode 64x4k, {kind}, of bfloat16's time", f"{part:.2f}"]
        cells += [f"{theirs.value:g}, fp8 at 64x8k: {theirs.who}", f"{part / theirs.value:.2f}", ""]
        lines.append(f"| {' | '.join(cells)} |")
    found, theirs = mine("prefill", "causal 8192, tiles of 128", "hopper_prefill"), best("H200", PREFILL, "tflops")
    assert theirs is not None
    rate = found["flops"] / found["us"] / 1e6
    cells = [PREFILL, f"{rate:.0f} TFLOP/s", f"{theirs.value:g}: {theirs.who}"]
    return "\n".join([*lines, f"| {' | '.join(cells)} | {theirs.value / rate:.2f} |  |"])
