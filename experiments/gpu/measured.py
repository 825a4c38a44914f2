"""python -m experiments.gpu.measured: writes the table of the stored records into the README of this folder. No jax."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.gpu.context import read_records

FOLDER = Path(__file__).parent
RECORDS, README = FOLDER / "h200" / "records.jsonl", FOLDER / "README.md"
# By the model of speed, of the code that was measured.
PREDICTIONS = FOLDER / "h200" / "predictions.json"
# Peers that read the same blocks; others read copies without blocks, or write in XLA.
PAGED = ("cuDNN paged", "jax paged_attention")
DECODES = ("64x4k", "32x4k", "8x8k", "1x128k+31x4k", "256x512", "1x32k", "1x4k")


class Line(NamedTuple):
    """One line of the table: what was measured, and the name of its prediction, "" for none.

    who: the candidates that count begin with it.
    """

    title: str
    metric: str
    case: str
    who: str
    computed: tuple[str, str] = ("", "")


LINES = (
    *(
        Line(f"decode {case}", "decode, blocks of 64", case, "hopper_decode", ("hopper attention", case))
        for case in DECODES
    ),
    *(
        Line(
            f"decode 64x4k, {kind}",
            "quantised",
            "64x4k",
            f"hopper_decode, {kind}",
            (f"hopper attention codes={codes}", "64x4k"),
        )
        for kind, codes in (("int8", "int8"), ("e4m3", "float8_e4m3fn"))
    ),
    Line(
        "prefill, causal 8k",
        "prefill",
        "causal 8192, tiles of 128",
        "hopper_prefill",
        ("hopper prefill q=32", "causal 8k"),
    ),
    Line("chunk of 512 at 4k", "mixed", "chunk of 512 at 4k", "hopper_prefill"),
    Line("write of 8k tokens", "kv write", "8192 tokens", "hopper", ("hopper kv write", "8k tokens")),
    *(
        Line(f"a layer without attention, {rows} rows", "products", f"{rows} rows", "hopper, where it pays")
        for rows in (8, 16, 64)
    ),
)
STEPS = (("1 rows of 1024, hopper", "1 row of 1k"), ("64 rows of 2048, hopper", "64 rows of 2k"))


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown of the records: ours beside the predictions and the fastest peers, then whole steps."""
    copy = {r["run"]: r["value"] for r in records if r.get("metric") == "copy bandwidth"}
    predicted = json.loads(PREDICTIONS.read_text())
    lines = [
        "| microseconds | measured | % of copy | computed | fastest peer with blocks | fastest peer |",
        "|---|---:|---:|---:|---|---|",
    ]
    for line in LINES:
        times = [r for r in records if _is_time(r) and (r["metric"], r["case"]) == (line.metric, line.case)]
        mine = min((r for r in times if r["ours"] and r["who"].startswith(line.who)), key=lambda r: r["us"])
        computed = predicted["cases"].get(line.computed[0], {}).get(line.computed[1])
        part = mine["bytes"] / mine["us"] / copy[mine["run"]] / 1e4
        peers = [r for r in times if not r["ours"] and r["right"]]
        paged = [r for r in peers if r["who"].startswith(PAGED)]
        cells = [line.title, f"{mine['us']:.1f}", f"{part:.0f}" if part > 20 else ""]
        lines.append(_row([*cells, f"{computed:.0f}" if computed else "", _fastest(paged), _fastest(peers)]))
    lines += ["", "| a step of Llama-8B's shape, ms | measured, device | computed |", "|---|---:|---:|"]
    for case, shape in STEPS:
        [step] = [r for r in records if r["kind"] == "step" and r["case"] == case and r["mode"] == "device"]
        lines.append(_row([shape, f"{step['us'] / 1e3:.2f}", f"{predicted['steps'][shape]:.2f}"]))
    lines += ["", "| engine | |", "|---|---:|"]
    for r in records:
        if r["kind"] == "value" and r["metric"].startswith("throughput") and "compiled" not in r["metric"]:
            lines.append(_row([r["metric"].removeprefix("throughput: "), f"{r['value']:.4g} {r['unit']}"]))
    return "\n".join(lines)


def _is_time(r: dict[str, Any]) -> bool:
    return r["kind"] == "time" and r["mode"] in ("chained", "graph")


def _fastest(peers: Sequence[dict[str, Any]]) -> str:
    found = min(peers, key=lambda r: r["us"], default=None)
    return f"{found['us']:.1f}, {found['who']}" if found else ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def with_table(readme: str) -> str:
    """The README's text with the table of the stored records."""
    begin, end = "<!-- begin: measured -->\n", "<!-- end: measured -->\n"
    return re.sub(
        f"(?<={begin}).*(?={end})", lambda _: f"\n{table(read_records(RECORDS))}\n\n", readme, flags=re.DOTALL
    )


def main() -> int:
    README.write_text(with_table(README.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
