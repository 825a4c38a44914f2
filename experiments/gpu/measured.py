"""python -m experiments.gpu.measured: writes what stored records say into the README. No jax."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.gpu import others
from experiments.gpu.context import read_records

FOLDER = Path(__file__).parent
RECORDS, README = FOLDER / "h200" / "records.jsonl", FOLDER / "README.md"
H100_RECORDS = FOLDER / "h100" / "records.jsonl"
# Runs whose records of a section stand for earlier ones, as the kernel has changed since.
SINCE = {"quantised": 3}
# Peers that read the same blocks; others read copies without blocks, or write in XLA.
PAGED = ("cuDNN paged", "jax paged_attention")
DECODES = ("64x4k", "32x4k", "8x8k", "1x128k+31x4k", "256x512", "1x32k", "1x4k")


class TableLine(NamedTuple):
    """One line of the table. who: prefix of the candidates that count."""

    title: str
    metric: str
    case: str
    who: str


LINES = (
    *(TableLine(f"decode {case}", "decode, blocks of 64", case, "hopper_decode") for case in DECODES),
    *(TableLine(f"decode 64x4k, {kind}", "quantised", "64x4k", f"hopper_decode, {kind}") for kind in ("int8", "e4m3")),
    TableLine("prefill, causal 8k", "prefill", "causal 8192, tiles of 128", "hopper_prefill"),
    TableLine("chunk of 512 at 4k", "mixed", "chunk of 512 at 4k", "hopper_prefill"),
    TableLine("write of 8k tokens, after a copy of them", "kv write", "8192 tokens", "hopper, 1 "),
    *(
        TableLine(f"a layer without attention, {rows} rows", "products", f"{rows} rows", "hopper, where it pays")
        for rows in (8, 16, 64)
    ),
    *(
        TableLine(f"the same, all four products ours, {rows} rows", "products", f"{rows} rows", "hopper, all four")
        for rows in (8, 64)
    ),
)


def stored() -> list[dict[str, Any]]:
    """The records of the H200, of kernels as they are now."""
    return [r for r in read_records(RECORDS) if r["run"] >= SINCE.get(r["section"], 1)]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown of the records of one GPU: ours next to the fastest peers, whole steps, and the engine if it ran."""
    copy = {r["run"]: r["value"] for r in records if r.get("metric") == "copy bandwidth"}
    lines = [
        "| microseconds | measured | % of copy | fastest peer with blocks | fastest peer |",
        "|---|---:|---:|---|---|",
    ]
    timed = {(r["metric"], r["case"]) for r in records if _is_time(r)}
    lines += [_measured(records, line, copy) for line in LINES if (line.metric, line.case) in timed]
    lines += ["", "| a step of Llama-8B's shape, ms | measured, device |", "|---|---:|"]
    steps = [r for r in records if r["kind"] == "step" and r["mode"] == "device"]
    lines += [_row([r["case"].removesuffix(", hopper"), f"{r['us'] / 1e3:.2f}"]) for r in steps]
    values = [r for r in records if r["kind"] == "value" and r["metric"].startswith("throughput")]
    engine = [
        _row([r["metric"].removeprefix("throughput: "), f"{r['value']:.4g} {r['unit']}"])
        for r in values
        if "compiled" not in r["metric"]
    ]
    return "\n".join([*lines, *(["", "| engine | |", "|---|---:|", *engine] if engine else [])])


def _measured(records: Sequence[dict[str, Any]], line: TableLine, copy: Mapping[int, float]) -> str:
    """Title, time and share of a copy of our fastest record of a line, then the fastest peers."""
    times = [r for r in records if _is_time(r) and (r["metric"], r["case"]) == (line.metric, line.case)]
    mine = min((r for r in times if r["ours"] and r["who"].startswith(line.who)), key=lambda r: r["us"])
    part = mine["bytes"] / mine["us"] / copy[mine["run"]] / 1e4
    peers = [r for r in times if not r["ours"] and r["right"]]
    paged = [r for r in peers if r["who"].startswith(PAGED)]
    cells = [line.title, f"{mine['us']:.1f}", f"{part:.0f}" if part > 20 else ""]
    return _row([*cells, _fastest(paged), _fastest(peers)])


def _is_time(r: dict[str, Any]) -> bool:
    return r["kind"] == "time" and r["mode"] in ("chained", "graph")


def _fastest(peers: Sequence[dict[str, Any]]) -> str:
    found = min(peers, key=lambda r: r["us"], default=None)
    return f"{found['us']:.1f}, {found['who']}" if found else ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def with_tables(readme: str) -> str:
    """Returns the text of the README with the tables of the stored records."""
    records = stored()
    made = {
        "measured": table(records),
        "measured by others": others.table(records),
        "measured on an H100": table(read_records(H100_RECORDS)),
    }
    for name, text in made.items():
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->\n"
        readme = re.sub(f"(?<={begin}).*(?={end})", lambda _, text=text: f"\n{text}\n\n", readme, flags=re.DOTALL)
    return readme


def main() -> int:
    README.write_text(with_tables(README.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
