"""Turns perplexity measurements into columns, notes and a summary sentence."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from ksana_jax.lab.runs import significance
from ksana_jax.lab.runs.tasks import kept
from ksana_jax.lab.runs.tasks.base import Results
from ksana_jax.lab.runs.tasks.compression import best_and_full, is_compressed, kv_said
from ksana_jax.lab.runs.tasks.results import Column, Measurement, Part, ResultRow, kib, number, of_metric
from ksana_jax.lab.runs.tasks.row_figure import against_numbers


class PerplexityResults(Results):
    """Reports perplexity measurements: columns, notes and a sentence."""

    measures_speed = False
    geometric = True
    samples = "texts"

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes one trial's summary.

        ppl, sampled_ppl: over all positions, over the sample. ppl_LOW_HIGH, sampled_ppl_LOW_HIGH: over a span of them.
        live_kv_bytes: held of a text after its last token. simulated_kv_bytes: that it would then hold if the memory of
        hidden tokens were freed. kv_read_bytes: that a query reads of them. peak_kv_bytes:
        maximum within a step. kv_token_bytes: of one token in all layers. weight_bytes: of the weights in memory.
        tokens_per_s: tokens scored per second, without compilation. kept: with engine.kept_tokens, share of a text's
        tokens to which its last one attends, mean over layers and KV heads.
        """
        speed, kv, result = [], [], {}
        for m in measurements:
            if m["metric"] == "speed":
                speed.append(m)
            elif m["metric"] == "kv":
                kv.append(m)
            elif m["metric"] == "compilations":
                result["num_compilations"] = m["count"]
        result |= kept.summarised(measurements)
        scores = _sums([m for m in measurements if m["metric"] == "nll"])
        result.update({key: perplexity(total / count) for key, (total, count) in scores.items()})
        if speed:
            result["tokens_per_s"] = sum(m["num_scored"] for m in speed) / sum(m["seconds"] for m in speed)
            result["compiled_while_timed"] = sum(m["compiled_while_timed"] for m in speed)
        if kv:
            result["peak_kv_bytes"] = max(m["peak_blocks"] * m["block_bytes"] for m in kv)
            # Older records do not have them.
            named = {"kv_token_bytes": "token_bytes", "weight_bytes": "weight_bytes"}
            result |= {key: kv[0][name] for key, name in named.items() if name in kv[0]}
        # Recomputation holds nothing between two tokens; its cost is its peak.
        if streamed := [m for m in kv if m["method"] == "stream"]:
            result["live_kv_bytes"] = max(held_blocks(m) * m["block_bytes"] for m in streamed)
            if "simulated_bytes" in streamed[0]:
                result["simulated_kv_bytes"] = max(m["simulated_bytes"] for m in streamed)
            if "read_bytes" in streamed[0]:
                result["kv_read_bytes"] = max(m["read_bytes"] for m in streamed)
        return result

    def parts(self, measurements: Sequence[Measurement]) -> dict[str, dict[Hashable, Part]]:
        """Returns the perplexity of each text, by its number of tokens."""
        by_text: dict[Hashable, list[Measurement]] = defaultdict(list)
        for m in measurements:
            if m["metric"] == "nll":
                by_text[_text(m)].append(m)
        parts: dict[str, dict[Hashable, Part]] = defaultdict(dict)
        for text, found in by_text.items():
            for key, (total, count) in _sums(found).items():
                subset = "sampled" if key.startswith("sampled") else "all"
                parts[key][text, _scored_places(found, subset)] = Part(perplexity(total / count), count)
        return dict(parts)

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        digits, found, sampled = number(2), spans(rows, "ppl_"), spans(rows, "sampled_ppl_")
        shown = []
        for a, b in found:
            change = f"loss {a:,}–{b - 1:,}, %" if (a, b) == found[-1] and not sampled else ""
            shown.append(Column(f"ppl_{a}_{b}", f"ppl {a:,}–{b - 1:,}", digits, "min", change=change))
        if sampled:
            positions = f"{sampled[0][0]:,}–{sampled[-1][1] - 1:,}"
            change = f"loss* {positions}, %"
            shown.append(Column("sampled_ppl", f"ppl* {positions}", digits, "min", change=change))
        # As versions before held_blocks recorded them.
        earlier = any(m["method"] == "stream" and "held_blocks" not in m for m in of_metric(rows, "kv"))
        live, token = "held of one text after its last token", "of a block codec, exact tokens included"
        if earlier:
            live = "maximum held of one text between steps, without its last chunk; of a text of one step, its peak KV"
            token = "of a block codec, its codes alone"
        shown.append(Column("live_kv_bytes", "live KV, KiB", kib, "min", exact=True, note=f"Live KV: {live}."))
        note = "Peak KV: maximum held within a step, including its chunk."
        shown.append(Column("peak_kv_bytes", "peak KV, KiB", kib, "min", exact=True, note=note))
        if any(row.simulated for row in rows):
            note = "Simulated KV: of a text after its last token, if the memory of hidden tokens were freed."
            shown.append(Column("simulated_kv_bytes", "simulated KV, KiB", kib, exact=True, note=note))
        if any(row.config.get("engine", {}).get("kv_selection") for row in rows):
            note = "KV read/token: by a query after a text's last token; with kv_selection, summaries included."
            shown.append(Column("kv_read_bytes", "KV read/token, KiB", kib, "min", exact=True, note=note))
        shown += kept.columns(rows)
        if differ(rows, "kv_token_bytes"):
            note = f"KV bytes/token: at the length of a text; {token}."
            shown.append(Column("kv_token_bytes", "KV bytes/token", number(0), "min", exact=True, note=note))
        if differ(rows, "weight_bytes"):
            shown.append(Column("weight_bytes", "weights, KiB", kib, "min", exact=True))
        return shown

    def headline(self, rows: Sequence[ResultRow]) -> Column | None:
        """Returns the column of perplexity at the last positions."""
        return next((c for c in reversed(self.columns(rows)) if "ppl" in c.key), None)

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        found = of_metric(rows, "nll")
        if not found:
            return []
        num_texts = len(set(map(_text, found)))
        lengths = sorted({m["text_tokens"] for m in found})
        num_sampled = max(sum(row.weights.get("sampled_ppl", ())) for row in rows)
        seeds = max(len(r.trials) for r in rows)
        # Earlier versions began each text with BOS, and did not record it.
        bos = ", BOS first" if all(m.get("bos", True) for m in found) else ""
        of = " to ".join(f"{length:,}" for length in dict.fromkeys((lengths[0], lengths[-1])))
        said = [
            f"{num_texts} text{'s' * (num_texts > 1)} of {of} tokens{bos}, the same in every row. Perplexity: "
            "exponential of the mean negative log-likelihood of all tokens at these positions."
        ]
        if num_sampled:
            said.append(
                f"Column ppl* scores the same {num_sampled:,.0f} sampled positions in every row, including "
                "recomputation."
            )
            if any(method(r) == "recompute" for r in rows):
                said.append(
                    "In the figure, the curve of recomputation is that of the most similar row, plus their difference "
                    "on the sample."
                )
        said += _repeats(rows)
        for subset in ("all", "sampled"):
            by_seed = zip(
                *(_places(r, subset) for r in rows if len(r.trials) == seeds and _places(r, subset)), strict=False
            )
            if any(len(set(places)) > 1 for places in by_seed):
                said.append("NOT COMPARABLE: rows were scored on different positions or texts.")
        return said

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        """Compares the best compressed row with the full cache, at the last positions of the texts; without one of
        them, it names the best row. Variants over a grid have a best one at each point."""
        if not (found := spans(rows, "ppl_")) or is_labelled_grid(rows):
            return ""
        low, high = found[-1]
        key = f"ppl_{low}_{high}"
        scored = [r for r in rows if r.mean(key) is not None]
        if not scored:
            return ""
        best, full = best_and_full(scored, _rank(key), _is_usable)
        compressed = list(filter(_is_usable, scored))
        said = f"At positions {low:,} to {high - 1:,} "
        said += _alone(best, scored, key) if full is None else _against_full(best, full, compressed, key)
        said += kv_said(best, full)
        for row in rows:
            theirs, ours = row.mean("sampled_ppl"), best.mean("sampled_ppl")
            if method(row) == "recompute" and theirs and ours:
                said += f"; on the sampled positions {row.name!r} has {_two(theirs)} against its {_two(ours)}"
                break
        return said + "."


def _sums(measurements: Sequence[Measurement]) -> dict[str, tuple[float, int]]:
    """Returns {summary key: (negative log-likelihood, tokens)} of measurements "nll"."""
    sums: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for m in measurements:
        prefix, size = "sampled_" if m["subset"] == "sampled" else "", m["bucket_tokens"]
        low, high = span(m["bucket"])
        for key in (f"{prefix}ppl", f"{prefix}ppl_{low * size}_{min(high * size, m['text_tokens'])}"):
            total, count = sums[key]
            sums[key] = total + m["sum"], count + m["count"]
    return dict(sums)


def _text(m: Measurement) -> str:
    """Returns a text's digest, or its name in older records."""
    return m.get("text_digest", m["text"])


def span(bucket: int) -> tuple[int, int]:
    """Returns the span of buckets [low, high) to which a bucket belongs: 0, 1, 2-3, 4-7, 8-15, ..."""
    low = 1 << (bucket.bit_length() - 1) if bucket else 0
    return low, max(1, 2 * low)


def perplexity(nll: float) -> float:
    """Returns the exponential of a mean negative log-likelihood; infinity if it overflows."""
    return math.exp(nll) if not nll > math.log(sys.float_info.max) else math.inf


def _scored_places(trial: Sequence[Measurement], subset: str) -> tuple:
    """Returns (text, bucket, count, positions) of a trial's scores; texts by content, or by name in older records."""
    nll = [m for m in trial if m["metric"] == "nll" and m["subset"] == subset]
    return tuple((_text(m), m["bucket"], m["count"], m["positions"]) for m in nll)


def live_blocks(kv: Measurement) -> list[int]:
    """Returns the blocks held after each step of a streamed text.

    Records of earlier versions lack the last step; for a text that fits one step, they have that step's blocks.
    """
    return kv["live_blocks"] or [kv["peak_blocks"]]


def held_blocks(kv: Measurement) -> int:
    """Returns the blocks held of a streamed text after its last token; see `live_blocks`."""
    return kv["held_blocks"] if "held_blocks" in kv else max(live_blocks(kv))


def spans(rows: Sequence[ResultRow], prefix: str) -> list[tuple[int, int]]:
    """Returns the spans of positions [low, high) for which summaries have a key "PREFIXlow_high", in order."""
    keys = {k for r in rows for k in r.values if k.startswith(prefix) and k.removeprefix(prefix)[:1].isdigit()}
    return sorted(tuple(int(n) for n in k.removeprefix(prefix).split("_")) for k in keys)  # pyright: ignore


def differ(rows: Sequence[ResultRow], key: str) -> bool:
    """True if rows that have a value differ in it."""
    return len({row.mean(key) for row in rows} - {None}) > 1


def is_labelled_grid(rows: Sequence[ResultRow]) -> bool:
    """True if the rows are named variants over one key of numbers, such as a budget, and all streamed. Rows outside the
    grid do not count."""
    rows = [row for row in rows if not row.point or any(value is not None for value in row.point.values())]
    streamed = all(row.label and len(row.point) == 1 and method(row) == "stream" for row in rows)
    return bool(rows) and streamed and against_numbers(rows)


def _places(row: ResultRow, subset: str) -> list[tuple]:
    """Returns the scored positions for each seed; empty if the row has no such subset."""
    return [places for trial in row.trials if (places := _scored_places(trial, subset))]


def _repeats(rows: Sequence[ResultRow]) -> list[str]:
    """Returns a note on seeds that drew another seed's texts."""
    most, of = max(
        (
            (len(r.trials) - len(set(places)), len(places))
            for r in rows
            for places in [_places(r, "all") or _places(r, "sampled")]
        ),
        default=(0, 0),
    )
    return [f"{most} of {of} seeds scored a text that another had scored: counted once."] if most else []


_two = number(2)
_PERPLEXITY = Column("ppl", "ppl", _two, "min")


def _is_usable(row: ResultRow) -> bool:
    return is_compressed(row) and not row.foresees and not row.simulated


def _rank(key: str) -> Callable[[ResultRow], tuple[bool, float, float]]:
    """Orders rows from the lowest perplexity; among rows displayed equally, the one with the least KV is better."""

    def rank(row: ResultRow) -> tuple[bool, float, float]:
        value = row.mean(key) or 0.0
        return math.isnan(value), round(value, 2), row.mean("live_kv_bytes") or 0.0

    return rank


def _alone(best: ResultRow, rows: Sequence[ResultRow], key: str) -> str:
    value = _two(best.mean(key) or 0.0)
    if len(rows) == 1:
        return f"{best.name!r} has a perplexity of {value}"
    said = _tied(best, rows, key)
    if max(len(r.values[key]) for r in rows) == 1:
        said = " (not resolved: one run each)"
    return f"{best.name!r} has the lowest perplexity, {value}{said}"


def _against_full(best: ResultRow, full: ResultRow, compressed: Sequence[ResultRow], key: str) -> str:
    which = "the lowest perplexity of the compressed rows," if len(compressed) > 1 else "a perplexity of"
    said = f"{best.name!r} has {which} {_two(best.mean(key) or 0.0)}{_tied(best, compressed, key)}"
    said += f", against {_two(full.mean(key) or 0.0)} of {full.name!r}"
    found = significance.change(best, full, key)
    shown = [] if found is None else [f"{found.text(_PERPLEXITY)} %"]
    return f"{said} ({'; '.join([*shown, *filter(None, [significance.caveat(best, full, key)])])})"


def _tied(best: ResultRow, rows: Sequence[ResultRow], key: str) -> str:
    """Counts the rows that the best one is not shown to beat, if there are several texts."""
    near = significance.tied(best, rows, key)
    resolved = len(best.values[key]) > 1
    return f" ({significance.others(len(near))} not significantly worse)" if near and resolved else ""


def method(row: ResultRow) -> str:
    """Returns the method by which a row was scored; empty if it was not scored."""
    return next((m["method"] for m in of_metric([row], "kv")), "")
