"""python -m experiments.gpu.measured: writes what stored records say, for READMEs and the model of speed. No jax."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.gpu import others
from experiments.gpu.computed import computed_us, names_of
from experiments.gpu.context import read_records
from pallas_kernels.speed import baseline
from pallas_kernels.speed.chip import H200

FOLDER = Path(__file__).parent
RECORDS, README = FOLDER / "h200" / "records.jsonl", FOLDER / "README.md"
H100_RECORDS = FOLDER / "h100" / "records.jsonl"
# Runs whose records of a section stand for earlier ones, as the kernel has changed since.
SINCE = {"quantised": 3}
# By the model of speed before it knew these records.
PREDICTIONS = FOLDER / "h200" / "predictions.json"
# Peers that read the same blocks; others read copies without blocks, or write in XLA.
PAGED = ("cuDNN paged", "jax paged_attention")
DECODES = ("64x4k", "32x4k", "8x8k", "1x128k+31x4k", "256x512", "1x32k", "1x4k")


class Line(NamedTuple):
    """One line of the table. who: prefix of the candidates that count."""

    title: str
    metric: str
    case: str
    who: str


LINES = (
    *(Line(f"decode {case}", "decode, blocks of 64", case, "hopper_decode") for case in DECODES),
    *(Line(f"decode 64x4k, {kind}", "quantised", "64x4k", f"hopper_decode, {kind}") for kind in ("int8", "e4m3")),
    Line("prefill, causal 8k", "prefill", "causal 8192, tiles of 128", "hopper_prefill"),
    Line("chunk of 512 at 4k", "mixed", "chunk of 512 at 4k", "hopper_prefill"),
    Line("write of 8k tokens, after a copy of them", "kv write", "8192 tokens", "hopper, 1 "),
    *(
        Line(f"a layer without attention, {rows} rows", "products", f"{rows} rows", "hopper, where it pays")
        for rows in (8, 16, 64)
    ),
    *(
        Line(f"the same, all four products ours, {rows} rows", "products", f"{rows} rows", "hopper, all four")
        for rows in (8, 64)
    ),
)
STEPS = (("1 rows of 1024, hopper", "1 row of 1k"), ("64 rows of 2048, hopper", "64 rows of 2k"))


def stored() -> list[dict[str, Any]]:
    """The records of the H200, of kernels as they are now."""
    return [r for r in read_records(RECORDS) if r["run"] >= SINCE.get(r["section"], 1)]


def times(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The microseconds of each shape of each case of `speed/baseline.json`, as first measured."""
    found: dict[str, dict[str, float]] = {}
    for r in records:
        named = names_of(r) if _is_time(r) else []
        # Writes were timed with a copy before them: `_copy_us`.
        if len(named) == 1 and r["right"] and r["metric"] != "kv write":
            [(case, shape)] = named
            found.setdefault(case, {}).setdefault(shape, round(r["us"], 1))
    return found


def _copy_us(records: Sequence[dict[str, Any]], line: Line) -> float:
    """Microseconds of a copy that a program made of its arguments before the kernel, by the memory that it took."""
    memory = (r for r in records if r.get("name") == "memory of a write" and r["who"].startswith(line.who))
    copied = next(memory)["temporary"] if line.metric == "kv write" else 0
    return 2e6 * copied / H200.copy_bytes_per_s + H200.launch_us if copied else 0.0


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown of the records: ours beside the predictions and the fastest peers, then whole steps."""
    copy = {r["run"]: r["value"] for r in records if r.get("metric") == "copy bandwidth"}
    predicted = json.loads(PREDICTIONS.read_text())
    lines = [
        "| microseconds | measured | % of copy | computed before | computed since | fastest peer with blocks | "
        "fastest peer |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for line in LINES:
        mine, cells, peers = _measured(records, line, copy)
        before = [predicted["cases"].get(case, {}).get(shape) for case, shape in names_of(mine)]
        before = before[0] if before else None
        since = computed_us(mine)
        since = None if since is None else since + _copy_us(records, line)
        lines.append(_row([*cells, *map(_whole, (before, since)), *peers]))
    heads = "| a step of Llama-8B's shape, ms | measured, device | computed before | computed since |"
    lines += ["", heads, "|---|---:|---:|---:|"]
    for case, shape in STEPS:
        [step] = [r for r in records if r["kind"] == "step" and r["case"] == case and r["mode"] == "device"]
        milliseconds = step["us"] / 1e3, predicted["steps"][shape], (computed_us(step) or 0) / 1e3
        lines.append(_row([shape, *(f"{ms:.2f}" for ms in milliseconds)]))
    lines += ["", "| engine | |", "|---|---:|"]
    for r in records:
        if r["kind"] == "value" and r["metric"].startswith("throughput") and "compiled" not in r["metric"]:
            lines.append(_row([r["metric"].removeprefix("throughput: "), f"{r['value']:.4g} {r['unit']}"]))
    return "\n".join(lines)


def _measured(records: Sequence[dict[str, Any]], line: Line, copy: Mapping[int, float]) -> tuple[dict, list, list]:
    """Our fastest record of a line; cells with its title, time and share of a copy; cells with the fastest peers."""
    times = [r for r in records if _is_time(r) and (r["metric"], r["case"]) == (line.metric, line.case)]
    mine = min((r for r in times if r["ours"] and r["who"].startswith(line.who)), key=lambda r: r["us"])
    part = mine["bytes"] / mine["us"] / copy[mine["run"]] / 1e4
    peers = [r for r in times if not r["ours"] and r["right"]]
    paged = [r for r in peers if r["who"].startswith(PAGED)]
    cells = [line.title, f"{mine['us']:.1f}", f"{part:.0f}" if part > 20 else ""]
    return mine, cells, [_fastest(paged), _fastest(peers)]


def h100_table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown of a run on an H100, which the model of speed does not know."""
    copy = {r["run"]: r["value"] for r in records if r.get("metric") == "copy bandwidth"}
    lines = [
        "| microseconds | measured | % of copy | fastest peer with blocks | fastest peer |",
        "|---|---:|---:|---|---|",
    ]
    timed = {(r["metric"], r["case"]) for r in records if _is_time(r)}
    for line in LINES:
        if (line.metric, line.case) in timed:
            _, cells, peers = _measured(records, line, copy)
            lines.append(_row([*cells, *peers]))
    lines += ["", "| a step of Llama-8B's shape, ms | measured, device |", "|---|---:|"]
    steps = [r for r in records if r["kind"] == "step" and r["mode"] == "device"]
    return "\n".join([*lines, *(_row([r["case"].removesuffix(", hopper"), f"{r['us'] / 1e3:.2f}"]) for r in steps)])


def _whole(us: float | None) -> str:
    return "" if us is None else f"{us:.0f}"


def _is_time(r: dict[str, Any]) -> bool:
    return r["kind"] == "time" and r["mode"] in ("chained", "graph")


def _fastest(peers: Sequence[dict[str, Any]]) -> str:
    found = min(peers, key=lambda r: r["us"], default=None)
    return f"{found['us']:.1f}, {found['who']}" if found else ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def with_tables(readme: str) -> str:
    """Returns the text of a README with the tables of the stored records that it has a place for."""
    records = stored()
    made = {
        "measured": table(records),
        "measured by others": others.table(records),
        "measured on an H100": h100_table(read_records(H100_RECORDS)),
    }
    for name, text in made.items():
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->\n"
        readme = re.sub(f"(?<={begin}).*(?={end})", lambda _, text=text: f"\n{text}\n\n", readme, flags=re.DOTALL)
    return readme


def main() -> int:
    baseline.MEASURED.write_text(json.dumps(times(stored()), indent=1) + "\n")
    for path in (README, baseline.README):
        path.write_text(with_tables(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
