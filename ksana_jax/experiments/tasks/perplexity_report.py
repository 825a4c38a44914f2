"""Turns perplexity measurements into columns, notes and a summary sentence."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Hashable, Sequence

from ksana_jax.experiments import noise
from ksana_jax.experiments.tasks.base import Column, Measurement, ResultRow, kib, number
from ksana_jax.experiments.tasks.row_figure import against_numbers


def span(bucket: int) -> tuple[int, int]:
    """Returns the span of buckets [low, high) to which a bucket belongs: 0, 1, 2-3, 4-7, 8-15, ..."""
    low = 1 << (bucket.bit_length() - 1) if bucket else 0
    return low, max(1, 2 * low)


def summarise(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Computes one trial's summary.

    ppl, sampled_ppl: over all positions, over the sample. ppl_LOW_HIGH, sampled_ppl_LOW_HIGH: over a span of them.
    live_kv_bytes, peak_kv_bytes: maximum between steps, within a step. kv_token_bytes: of one token in all layers.
    tokens_per_s: tokens scored per second, compilation excluded.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    speed, kv, result = [], [], {}
    for m in measurements:
        if m["metric"] == "nll":
            prefix, size = "sampled_" if m["subset"] == "sampled" else "", m["bucket_tokens"]
            low, high = span(m["bucket"])
            for key in (f"{prefix}ppl", f"{prefix}ppl_{low * size}_{min(high * size, m['text_tokens'])}"):
                sums[key][0] += m["sum"]
                sums[key][1] += m["count"]
        elif m["metric"] == "speed":
            speed.append(m)
        elif m["metric"] == "kv":
            kv.append(m)
        elif m["metric"] == "compilations":
            result["num_compilations"] = m["count"]
    result.update({key: perplexity(total / count) for key, (total, count) in sums.items()})
    if speed:
        result["tokens_per_s"] = sum(m["num_scored"] for m in speed) / sum(m["seconds"] for m in speed)
        result["compiled_while_timed"] = sum(m["compiled_while_timed"] for m in speed)
    if kv:
        result["peak_kv_bytes"] = max(m["peak_blocks"] * m["block_bytes"] for m in kv)
        if "token_bytes" in kv[0]:  # older records do not have it
            result["kv_token_bytes"] = kv[0]["token_bytes"]
    # Recomputation holds nothing between two tokens; its cost is its peak.
    if streamed := [m for m in kv if m["method"] == "stream"]:
        result["live_kv_bytes"] = max(max(live_blocks(m)) * m["block_bytes"] for m in streamed)
    return result


def perplexity(nll: float) -> float:
    """Returns the exponential of a mean negative log-likelihood; infinity if it overflows."""
    return math.exp(nll) if not nll > math.log(sys.float_info.max) else math.inf


def sample(key: str, measurements: Sequence[Measurement]) -> Hashable | None:
    """Returns the texts and positions of a perplexity; None for other keys, whose values vary between repeats."""
    for prefix, subset in (("sampled_ppl", "sampled"), ("ppl", "all")):
        if key.startswith(prefix):
            return _scored_places(measurements, subset)
    return None


def _scored_places(trial: Sequence[Measurement], subset: str) -> tuple:
    """Returns (text, bucket, count, positions) of a trial's scores; texts by content, or by name in older records."""
    nll = [m for m in trial if m["metric"] == "nll" and m["subset"] == subset]
    return tuple((m.get("text_digest", m["text"]), m["bucket"], m["count"], m["positions"]) for m in nll)


def live_blocks(kv: Measurement) -> list[int]:
    """Returns the blocks held after each step of a streamed text, except the last step, which releases everything.

    For a text that fits one step, it returns the blocks held within that step.
    """
    return kv["live_blocks"] or [kv["peak_blocks"]]


def spans(rows: Sequence[ResultRow], prefix: str) -> list[tuple[int, int]]:
    """Returns the spans of positions [low, high) for which summaries have a key "PREFIXlow_high", in order."""
    keys = {k for r in rows for k in r.values if k.startswith(prefix) and k.removeprefix(prefix)[:1].isdigit()}
    return sorted(tuple(int(n) for n in k.removeprefix(prefix).split("_")) for k in keys)  # pyright: ignore


def columns(rows: Sequence[ResultRow]) -> list[Column]:
    digits = number(2)
    shown = [Column(f"ppl_{a}_{b}", f"ppl {a:,}–{b - 1:,}", digits, "min") for a, b in spans(rows, "ppl_")]
    if sampled := spans(rows, "sampled_ppl_"):
        shown.append(Column("sampled_ppl", f"ppl* {sampled[0][0]:,}–{sampled[-1][1] - 1:,}", digits, "min"))
    shown.append(Column("live_kv_bytes", "live KV, KiB", kib, "min", exact=True))
    shown.append(Column("peak_kv_bytes", "peak KV, KiB", kib, "min", exact=True))
    if len({row.mean("kv_token_bytes") for row in rows} - {None}) > 1:
        shown.append(Column("kv_token_bytes", "KV bytes/token", number(0), "min", exact=True))
    return [*shown, Column("tokens_per_s", "tokens/s", number(0), "max")]


def notes(rows: Sequence[ResultRow]) -> list[str]:
    found = [m for r in rows for trial in r.trials for m in trial if m["metric"] == "nll"]
    if not found:
        return []
    names = {m.get("text_digest", m["text"]) for m in found}
    count = {s: max(_scored(trial, s) for r in rows for trial in r.trials) for s in ("all", "sampled")}
    seeds = max(len(r.trials) for r in rows)
    draws = max(len(values) for r in rows for key, values in r.values.items() if "ppl" in key)
    said = [
        f"Perplexity by position in the text; position 0 is BOS. Columns ppl score every position of the texts "
        f"({count['all']:,} tokens, {len(names)} {'text' if len(names) == 1 else 'texts'}), the same in every row."
    ]
    if count["sampled"]:
        said.append(
            f"Column ppl* scores the same {count['sampled']:,} sampled positions in every row, including recomputation."
        )
        if any(method(r) == "recompute" for r in rows):
            said.append(
                "In the figure, the curve of recomputation is that of the most similar row, plus their difference on "
                "the sample."
            )
    if draws > 1:
        said.append(
            f"Mean ± standard deviation over up to {draws} seeds, which draw the texts; counts are for one seed."
        )
    said += _repeats(rows)
    said.append("Live KV: maximum held between steps; peak KV: maximum held within a step, including its chunk.")
    together = [m.get("num_texts", 1) for r in rows for trial in r.trials for m in trial if m["metric"] == "speed"]
    if max(together, default=1) > 1:
        said.append(f"tokens/s: {max(together)} texts scored side by side; KV is that of one text alone.")
    if equal_bytes := front(rows):
        names = ", ".join(repr(row.name) for row in equal_bytes)
        said.append(f"Lowest mean perplexity at the last positions for their live KV or less (Pareto front): {names}.")
    if any(m["metric"] == "kv" and m.get("live_blocks") == [] for r in rows for trial in r.trials for m in trial):
        said.append(
            "Texts that fit one step are held completely: their live KV is their peak KV, regardless of the pattern. A "
            "smaller engine.max_num_batched_tokens splits them into chunks."
        )
    for subset in ("all", "sampled"):
        by_seed = zip(
            *(_places(r, subset) for r in rows if len(r.trials) == seeds and _places(r, subset)), strict=False
        )
        if any(len(set(places)) > 1 for places in by_seed):
            said.append("NOT COMPARABLE: rows were scored on different positions or texts.")
    if any((r.mean("compiled_while_timed") or 0) > 0 for r in rows):
        said.append("tokens/s of some rows includes compilation.")
    return said


def is_labelled_grid(rows: Sequence[ResultRow]) -> bool:
    """Whether the rows are named variants over one key of numbers, such as a budget, and all streamed."""
    streamed = all(row.label and len(row.point) == 1 and method(row) == "stream" for row in rows)
    return bool(rows) and streamed and against_numbers(rows)


def front(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Returns the rows of a labelled grid that no row with as little live KV beats at the last positions, by live KV.

    By means alone, as displayed; of rows that are equal in both, the first.
    """
    measured = [row for row in rows if row.trials]
    if not is_labelled_grid(measured) or not (found := spans(measured, "ppl_")):
        return []
    key = "ppl_{}_{}".format(*found[-1])
    points = {id(r): (r.mean("live_kv_bytes") or 0.0, round(r.mean(key) or 0.0, 2)) for r in measured}
    best, kept = math.inf, []
    for row in sorted(measured, key=lambda r: points[id(r)]):
        if points[id(row)][1] < best:
            best = points[id(row)][1]
            kept.append(row)
    return kept


def _scored(trial: Sequence[Measurement], subset: str) -> int:
    return sum(m["count"] for m in trial if m["metric"] == "nll" and m["subset"] == subset)


def _places(row: ResultRow, subset: str) -> list[tuple]:
    """Returns the scored positions for each seed; empty if the row has no such subset."""
    return [places for trial in row.trials if (places := _scored_places(trial, subset))]


def _repeats(rows: Sequence[ResultRow]) -> list[str]:
    """Returns a note on seeds that drew texts which another seed had drawn."""
    most, of = max(
        (
            (len(r.trials) - len(set(places)), len(places))
            for r in rows
            for places in [_places(r, "all") or _places(r, "sampled")]
        ),
        default=(0, 0),
    )
    if not most:
        return []
    if most == of - 1:
        return [f"{of} seeds scored the same text: counted once."]
    return [f"{most} of {of} seeds scored a text that another had scored: counted once."]


def conclusion(rows: Sequence[ResultRow]) -> str:
    """Names the best and the worst row at the last positions of the texts, and the KV of the best."""
    if not (found := spans(rows, "ppl_")):
        return ""
    low, high = found[-1]
    key = f"ppl_{low}_{high}"
    scored = [(ppl, r) for r in rows if (ppl := r.mean(key)) is not None]
    if not scored:
        return ""
    # Rows that are displayed equally count as equal; the first of them is named.
    (least, best), (most, worst) = (pick(scored, key=lambda s: round(s[0], 2)) for pick in (min, max))
    said = f"At positions {low:,} to {high - 1:,} {best.name!r} "
    if worst is best:
        said += f"has a perplexity of {least:,.2f}"
    else:
        equals = [r for _, r in scored if r is not best and not noise.differ(best, r, key)]
        caveat = noise.caveat(best, worst, key)
        said += "has the lowest perplexity (" if caveat or equals else "predicts best (perplexity "
        said += f"{least:,.2f}, against {most:,.2f} of {worst.name!r}"
        said += f"; {caveat})" if caveat else f"; {noise.others(len(equals))} within the noise)" if equals else ")"
    held = [(live, r) for _, r in scored if (live := r.mean("live_kv_bytes"))]
    mine = best.mean("live_kv_bytes")
    if held and mine:
        largest, owner = max(held, key=lambda h: h[0])
        if owner is best:
            said += (
                f", with {kib(mine)} KiB of KV, the most of all rows"
                if len(held) > 1
                else f", with {kib(mine)} KiB of KV"
            )
        else:
            said += f", with {kib(mine)} KiB of KV, {mine / largest:.1%} of what {owner.name!r} holds"
    for row in rows:
        theirs, ours = row.mean("sampled_ppl"), best.mean("sampled_ppl")
        if method(row) == "recompute" and theirs and ours:
            ratio = (best.mean("tokens_per_s") or math.nan) / (row.mean("tokens_per_s") or math.nan)
            said += f"; on the sampled positions {row.name!r} has {theirs:,.2f} against its {ours:,.2f}"
            said += f", {ratio:,.0f} times slower" if ratio > 1 else ""
            said += f" ({caveat})" if (caveat := noise.caveat(best, row, "tokens_per_s")) and ratio > 1 else ""
            break
    return said + "."


def method(row: ResultRow) -> str:
    """Returns the method by which a row was scored; empty if it was not scored."""
    return next((m["method"] for trial in row.trials for m in trial if m["metric"] == "kv"), "")
