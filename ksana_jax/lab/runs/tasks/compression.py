"""Finds the rows that compress the KV cache, and the full-cache row to compare them with. Knows settings and
bytes, no quality."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ksana_jax.core.config import EngineConfig
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.lab.runs import dotted
from ksana_jax.lab.runs.tasks.results import SIMULATED, ResultRow, kib, ranked

# Keys that must be equal for rows to differ by their cache alone; the engine's settings should differ little.
_SAME = ("model", "load_format", "settings", "inputs")
_PLAIN = (str, int, float, type(None))


def is_compressed(row: ResultRow) -> bool:
    """True if a row drops keys and values by a window or by eviction, or stores them in fewer bits than it computes."""
    engine = row.config.get("engine", {})
    patterns = [row.config.get("pattern") or {}, *row.config.get("layer_patterns", ())]
    bits = engine.get("kv_cache_dtype", "auto") not in ("auto", "f32", engine.get("dtype", EngineConfig.dtype))
    return bits or _evicts(engine.get("kv_eviction")) or any(p.get("window") is not None for p in patterns)


def _evicts(setting: Mapping[str, Any] | None) -> bool:
    """True if a budget may keep less than all of a text. A budget of 1.0 is all of it; of 1 it is a token."""
    if not setting:
        return False
    budget = setting.get("budget")
    return not (isinstance(budget, float) and budget == 1 and setting.get("layers", "uniform") == "uniform")


def facts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the records of a trial say of its eviction method: "memory" is "simulated" if it hides evicted
    tokens; "foresees" is true if it must know the text beforehand: an upper bound, not a usable cache; "eviction" has
    its settings by dotted key, defaults included."""
    try:
        method = read_eviction(config.get("engine", {}).get("kv_eviction"))
    except ValueError:  # a setting of an earlier version, or a class that is not here or not trusted
        method = None
    if method is None:
        return {}
    settings = dotted.flat(dataclasses.asdict(method))
    facts: dict[str, Any] = {"eviction": {k: v for k, v in settings.items() if isinstance(v, _PLAIN)}}
    facts |= {"memory": "simulated"} if method.hides else {}
    return facts | ({"foresees": True} if method.needs_full_text else {})


def marked(row: ResultRow, start: Mapping[str, Any]) -> ResultRow:
    """Returns a row with the facts of its method; one of simulated memory with a mark, and without the bytes of KV that
    it really held.

    Args:
      start: record of one of its trials.
    """
    facts = {**facts_of(row.config), **start}
    row = dataclasses.replace(row, foresees=facts.get("foresees") is True)
    if facts.get("memory") != "simulated":
        return row

    def is_held(key: str) -> bool:
        return "kv" in key and key.endswith("bytes") and not key.startswith("simulated_")

    values = {key: found for key, found in row.values.items() if not is_held(key)}
    return dataclasses.replace(row, label=(row.label + SIMULATED).lstrip(), values=values, simulated=True)


def simulated_note(rows: Sequence[ResultRow]) -> list[str]:
    """Returns a note if memory of a row is simulated."""
    said = (
        "Simulated memory: evicted tokens are hidden and not freed. Such rows have no bytes and no rank among others."
    )
    return [said] * any(row.simulated for row in rows)


def full_row(row: ResultRow, rows: Iterable[ResultRow]) -> ResultRow | None:
    """Returns the row with the full cache whose settings are nearest to a compressed row's, on the same model,
    texts and task; None if there is none."""
    full = [r for r in rows if r.config and not is_compressed(r)]
    same = [r for r in full if all(r.config.get(name) == row.config.get(name) for name in _SAME)]
    return min(same, key=lambda r: _num_differences(r, row), default=None)


def best_and_full(
    rows: Sequence[ResultRow], rank: Callable[[ResultRow], Any], compressed: Callable[[ResultRow], bool] = is_compressed
) -> tuple[ResultRow, ResultRow | None]:
    """Returns the best compressed row and the row with the full cache that it is compared with; without one of them,
    the best row and None.

    Args:
      rows: at least one. rank: a key by which the best row is the smallest.
    """
    rows = ranked(rows)
    best = min(filter(compressed, rows), key=rank, default=None)
    full = None if best is None else full_row(best, rows)
    return (min(rows, key=rank), None) if best is None or full is None else (best, full)


def kv_said(row: ResultRow, full: ResultRow | None = None) -> str:
    """Describes a row's live KV, and its fraction of the full cache's; empty if it was not measured."""
    if (mine := row.mean("live_kv_bytes")) is None:
        return ", with simulated memory" * row.simulated
    said = f", with {kib(mine)} KiB of KV"
    whole = None if full is None else full.mean("live_kv_bytes")
    return f"{said}, {mine / whole:.1%} of what {full.name!r} holds" if full is not None and whole else said


def _num_differences(a: ResultRow, b: ResultRow) -> int:
    mine, theirs = (row.config.get("engine", {}) for row in (a, b))
    return sum(mine.get(name) != theirs.get(name) for name in {*mine, *theirs})
