"""The table of measurements, from records alone. No jax."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

COLUMNS = (
    "metric",
    "case",
    "ours",
    "us",
    "spread",
    "MHz",
    "one by one",
    "MB",
    "% of copy",
    "best peer",
    "us",
    "ratio",
    "bar",
    "met",
)
# Target share of the measured copy bandwidth, from this size of keys and values.
DECODE_PART, LARGE_BYTES = 0.85, 256 * 2**20
# Target ratio to the best peer that reads the same blocks.
PEER_RATIO = 0.95
# The row of very unlike lengths: time against its bytes at the copy bandwidth.
TAIL_CASE, TAIL_FACTOR = "1x128k+31x4k", 1.15


def table(results: dict[str, Any]) -> str:
    """Text of the whole: how sections ended, ceilings, one row for each case, then single numbers and failures."""
    records = results["records"]
    parts = ["", "== experiments.gpu " + "=" * 60, *_sections(results["sections"]), ""]
    copy = next((r["value"] for r in records if r["kind"] == "value" and r["metric"] == "copy bandwidth"), None)
    parts += [f"copy ceiling: {copy:.2f} TB/s" if copy else "copy ceiling: not measured", ""]
    tiny = "--tiny" in results.get("options", ())
    if tiny:
        parts[-1:] = ["tiny shapes: this run tried the code and measured nothing", ""]
    rows = [_row(group, copy, tiny) for group in _cases(records).values()]
    if rows:
        parts += [_aligned([COLUMNS, *rows]), ""]
    values = [r for r in records if r["kind"] == "value"]
    if values:
        lines = [(r["metric"], f"{r['value']:.4g}", r["unit"], r["bar"], _met(r["met"])) for r in values]
        parts += [_aligned([("metric", "value", "unit", "bar", "met"), *lines]), ""]
    parts += _failures(records)
    return "\n".join(parts)


def _sections(sections: dict[str, Any]) -> list[str]:
    return [f"{name:<14}{s['seconds']:>7.1f} s  {s['status']}" for name, s in sections.items()]


def _cases(records: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    groups = defaultdict(list)
    for r in records:
        if r["kind"] == "time" and r["mode"] not in ("ceiling", "part"):
            groups[r["metric"], r["case"]].append(r)
    return groups


def _row(group: list[dict[str, Any]], copy: float | None, tiny: bool) -> tuple[str, ...]:
    """One line for a case: our fastest next to the fastest peer, both without what the host needs."""
    of_device = [r for r in group if r["mode"] != "dispatched"]
    mine = min((r for r in of_device if r["ours"]), key=_rank, default=None)
    peer = min((r for r in of_device if not r["ours"] and r["right"] is not False), key=_rank, default=None)
    first = group[0]
    if mine is None:
        name, us = (peer["who"], f"{peer['us']:.1f}") if peer else ("", "")
        size = f"{first['bytes'] / 1e6:.1f}"
        return (first["metric"], first["case"], "-", "", "", "", "", size, "", name, us, "", "", "")
    single = next((r["us"] for r in group if r["mode"] == "dispatched" and r["who"] == mine["who"]), None)
    part = mine["bytes"] / (mine["us"] * 1e-6) / (copy * 1e12) if copy else None
    ratio = peer["us"] / mine["us"] if peer else None
    bars, met = ("", "") if tiny else _bars(mine, part, ratio)
    return (
        mine["metric"],
        mine["case"],
        mine["who"] + ("" if mine["right"] else " (WRONG)" if mine["right"] is False else " (unchecked)"),
        f"{mine['us']:.1f}",
        _spread(mine),
        _clocks(mine),
        f"{single:.1f}" if single else "",
        f"{mine['bytes'] / 1e6:.1f}",
        f"{100 * part:.0f}" if part else "",
        peer["who"] if peer else "",
        f"{peer['us']:.1f}" if peer else "",
        f"{ratio:.2f}" if ratio else "",
        bars,
        met,
    )


def _spread(r: dict[str, Any]) -> str:
    return f"{r['us_low']:.1f}-{r['us_high']:.1f}" + " next to compilers" * bool(r.get("compiling"))


def _clocks(r: dict[str, Any]) -> str:
    """Clocks of the multiprocessors, lowest and highest during timing."""
    low, high = r.get("sm_mhz") or (0, 0)
    return "" if not high else f"{high:.0f}" if low == high else f"{low:.0f}-{high:.0f}"


def _rank(r: dict[str, Any]) -> tuple[bool, float]:
    """Right ones first, then the fastest."""
    return r["right"] is False, r["us"]


def _bars(mine: dict[str, Any], part: float | None, ratio: float | None) -> tuple[str, str]:
    bars, met = [], []
    if not mine["metric"].startswith("decode"):
        return "", ""
    if mine["bytes"] >= LARGE_BYTES and part is not None:
        bars.append(f">= {100 * DECODE_PART:.0f} %")
        met.append(part >= DECODE_PART)
    if mine["case"] == TAIL_CASE and part is not None:
        bars.append(f"<= {TAIL_FACTOR} x floor")
        met.append(1 / part <= TAIL_FACTOR)
    if ratio is not None:
        bars.append(f">= {PEER_RATIO} of peer")
        met.append(ratio >= PEER_RATIO)
    right = mine["right"] is True
    return ", ".join(bars), "" if not bars else _met(all(met) and right)


def _met(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "NO"


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _failures(records: list[dict[str, Any]]) -> list[str]:
    """One line for each reason, with how often it was given."""
    found: dict[tuple[str, str, str], int] = {}
    for r in records:
        if r["kind"] == "failed":
            who = r.get("who") or r["what"]
            key = ("unsupported" if r["unsupported"] else "FAILED", who, r["reason"][:160])
            found[key] = found.get(key, 0) + 1
    lines = [f"{kind:<12}{who}: {reason}" + f"  ({n} times)" * (n > 1) for (kind, who, reason), n in found.items()]
    return ["what did not run:", *sorted(lines, reverse=True)] if lines else []
