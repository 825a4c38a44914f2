"""python -m experiments.gpu.importing FILE.json [FOLDER]

Writes a bundle of `python -m experiments.gpu` as the records of a run, for `ksana report` and `compare`. No jax.

A bundle is one JSON object: "kind" and "schema_version", "started" (UTC), "tiny", "device", "driver" and "ptxas" (text
or null), "packages" ({name: version}), "copy_bytes_per_s" (a number or null), "sections" and "records". Of the records,
times of kernels and of whole steps become measurements; `experiments.gpu.context` describes all of them.
"""

from __future__ import annotations

import calendar
import dataclasses
import hashlib
import json
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ksana_jax.core.config import ConfigError
from ksana_jax.core.files import open_to_read, read_bytes, write_atomic
from ksana_jax.lab.runs import plain_json
from ksana_jax.lab.runs.records import Records
from ksana_jax.lab.runs.report import records_text
from ksana_jax.lab.runs.tasks.base import Results, number
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND, SCHEMA_VERSION = "ksana gpu measurements", 1
STARTED = "%Y-%m-%dT%H:%M:%SZ"
# A bundle of 860 records has 0.3 MB.
MAX_BYTES = 64 << 20

_TEXT_OR_NONE = (str, type(None))
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "started": str, "tiny": bool, "device": _TEXT_OR_NONE, "driver": _TEXT_OR_NONE, "ptxas": _TEXT_OR_NONE,
    "packages": dict, "copy_bytes_per_s": (int, float, type(None)), "sections": dict, "records": list,
}  # fmt: skip
# Modes whose times are no separate case: ceilings, and parts of a kernel.
_NO_CASES = ("ceiling", "part")
# Modes of calls without the host, and of whole steps.
_OF_DEVICE = ("chained", "graph", "device")


def fastest(measurements: Sequence[Measurement], ours: bool) -> Measurement | None:
    """Returns our or a peer's fastest correct candidate of one case; None without one."""
    times = (m for m in measurements if m["ours"] is ours and m["mode"] in _OF_DEVICE and m["right"] is not False)
    return min(times, key=lambda m: m["us"], default=None)


class KernelTimes(Results):
    """Times of kernels and steps on a GPU. A trial is one case: the times of all candidates that were tried on it.

    Measurements: "metric" is "time"; "who", "ours", "mode", "right" (None: not checked), "us", "us_low", "us_high";
    "bytes", the minimum read and written; "copy_bytes_per_s" of the same run.
    """

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        mine, peer = (fastest(measurements, ours) for ours in (True, False))
        found: dict[str, float] = {}
        if mine is not None:
            found["us"] = mine["us"]
            if mine["copy_bytes_per_s"] and mine["bytes"]:
                found["of_copy"] = 1e8 * mine["bytes"] / mine["us"] / mine["copy_bytes_per_s"]
        if peer is not None:
            found["peer_us"] = peer["us"]
        if mine is not None and peer is not None:
            found["peer_ratio"] = peer["us"] / mine["us"]
        return found

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        columns = (
            Column("us", "us", number(1)),
            Column("of_copy", "% of copy", number(0)),
            Column("peer_us", "best peer, us", number(1)),
            Column("peer_ratio", "peer / ours", number(2)),
        )
        return [column for column in columns if any(column.key in row.values for row in rows)]

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws the reached share of a copy's bandwidth, or the times of a run without that measurement."""
        from ksana_jax.lab.runs.figures import COLOURS
        from ksana_jax.lab.runs.tasks.row_figure import draw_bars

        key, title = ("of_copy", "% of copy") if any("of_copy" in row.values for row in rows) else ("us", "us")
        shown = [row for row in rows if key in row.values]
        if shown:
            axes = figure.subplots()
            # The names of kernels and runs would leave no room for bars.
            short = [textwrap.shorten(row.point["case"], 28, placeholder="…") for row in shown]
            named = [dataclasses.replace(row, label=name, point={}) for row, name in zip(shown, short)]
            draw_bars(axes, named, key, COLOURS[1])
            axes.tick_params(axis="y", labelsize=5)
            axes.set_xlabel(title)

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        measurements = [(row, m) for row in rows for trial in row.trials for m in trial]
        wrong = dict.fromkeys(
            f"{m['who']} ({', '.join(row.point.values())})" for row, m in measurements if m["right"] is False
        )
        notes = [f"Wrong results, left out: {'; '.join(wrong)}."] if wrong else []
        if any(m["tiny"] for _, m in measurements):
            notes.append("Tiny shapes: a run with --tiny tries the code and measures nothing.")
        return notes


def import_bundle(path: Path, folder: Path | None = None) -> Path:
    """Writes records.jsonl of a bundle to a folder that `ksana report` and `compare` read.

    Args:
      folder: None takes the bundle's path without its suffix.

    Returns:
      The folder.

    Raises:
      ConfigError: the file is no bundle, or the folder has other records.
      OSError: the file cannot be read.
    """
    folder = path.with_suffix("") if folder is None else folder
    if folder == path:
        raise ConfigError(f"{path} has no suffix, and the records need a folder next to it: name a folder")
    text, records = _text_of(_read(path)), folder / "records.jsonl"
    if records.exists() and read_bytes(records) != text.encode():
        raise ConfigError(f"{folder} has records of another run than {path.name}: name a folder, or remove them")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(records, text)
    return folder


def _read(path: Path) -> dict[str, Any]:
    def no_bundle(reason: str) -> ConfigError:
        return ConfigError(f"{path} is not a bundle of `python -m experiments.gpu`: {reason}")

    with open_to_read(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise no_bundle(f"it has more than {MAX_BYTES >> 20} MiB")
    try:
        bundle = json.loads(content, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise no_bundle(f"{type(error).__name__}: {str(error)[:100]}") from error
    if not isinstance(bundle, dict) or bundle.get("kind") != KIND:
        raise no_bundle(f"it has no kind {KIND!r}")
    if bundle.get("schema_version") != SCHEMA_VERSION:
        version = bundle.get("schema_version")
        raise no_bundle(f"it has schema_version {version!r:.20}, this version reads {SCHEMA_VERSION}")
    if reason := _unlike(bundle, _FIELDS) or _beyond({"copy_bytes_per_s": bundle["copy_bytes_per_s"] or 1}):
        raise no_bundle(reason)
    try:
        time.strptime(bundle["started"], STARTED)
    except ValueError:
        raise no_bundle(f"'started' is {bundle['started']!r:.40}, not a time such as 2026-11-26T09:30:00Z") from None
    for index, record in enumerate(bundle["records"]):
        if reason := _unlike_a_record(record):
            raise no_bundle(f"record {index}: {reason}")
    if not any(map(_is_case, bundle["records"])):
        raise no_bundle(f"of its {len(bundle['records'])} records none is the time of a kernel or a step")
    return bundle


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")


def _unlike(values: Any, fields: Mapping[str, type | tuple[type, ...]]) -> str | None:
    """Returns how an object differs from its fields; None if it has them all."""
    if not isinstance(values, dict):
        return f"{values!r:.40} is not an object"
    for name, wanted in fields.items():
        if name not in values:
            return f"it has no {name!r}"
        kinds = wanted if isinstance(wanted, tuple) else (wanted,)
        if not isinstance(values[name], kinds) or (isinstance(values[name], bool) and bool not in kinds):
            return f"{name!r} is {values[name]!r:.40}"
    return None


_NUMBER = (int, float)
_MOST = 1e18
_OF_TIMES = {"case": str, "mode": str, "us": _NUMBER, "us_low": _NUMBER, "us_high": _NUMBER}
_OF_KERNELS = {"metric": str, "who": str, "ours": bool, "right": (bool, type(None)), "bytes": _NUMBER}


def _unlike_a_record(record: Any) -> str | None:
    if reason := _unlike(record, {"kind": str}):
        return reason
    if not _is_case(record):
        return None
    if reason := _unlike(record, _OF_TIMES | (_OF_KERNELS if record["kind"] == "time" else {})):
        return reason
    us = {name: record[name] for name in ("us", "us_low", "us_high") if record.get(name) is not None}
    return _beyond(us) or _beyond({"bytes": record.get("bytes") or 1})


def _beyond(values: Mapping[str, Any]) -> str | None:
    """Returns the number that is not positive or implausibly large; None if all are in bounds."""
    for name, value in values.items():
        if not isinstance(value, _NUMBER) or not 0 < value < _MOST:
            return f"{name!r} is {value!r:.40}, must be between 0 and {_MOST:g}"
    return None


def _is_case(record: Any) -> bool:
    kind = record.get("kind") if isinstance(record, dict) else None
    return kind == "step" or (kind == "time" and record.get("mode") not in _NO_CASES)


def _text_of(bundle: Mapping[str, Any]) -> str:
    """Returns the bundle as the text of a file of records: equal bundles give equal text."""
    cases: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in filter(_is_case, bundle["records"]):
        metric = "step" if record["kind"] == "step" else record["metric"]
        cases[metric, record["case"]].append(_measurement(record, bundle))
    task = "experiments.gpu.importing:KernelTimes"  # __module__ is __main__ in the command
    about = {name: bundle[name] for name in ("device", "driver", "ptxas", "packages", "tiny", "started")}
    rows = {case: {"label": _by(found), "point": dict(zip(("metric", "case"), case))} for case, found in cases.items()}
    configs = {case: {"task": task, "settings": about, **row} for case, row in rows.items()}
    texts = {case: plain_json.dumps(config) for case, config in configs.items()}
    ids = {case: hashlib.sha256(text.encode()).hexdigest()[:12] for case, text in texts.items()}
    jax = bundle["packages"].get("jax")
    named = [bundle["device"] or "unknown device", bundle["driver"] and f"driver {bundle['driver']}"]
    named += [jax and f"jax {jax}", bundle["ptxas"] and f"ptxas {bundle['ptxas']}", bundle["started"][:10]]
    plan = {
        "name": "gpu",
        "title": ", ".join(filter(None, named)),
        "task": task,
        "rows": [{**row, "trials": [ids[case]]} for case, row in rows.items()],
        "time": calendar.timegm(time.strptime(bundle["started"], STARTED)),
    }
    starts = {ids[c]: {"trial": ids[c], "config": configs[c], "environment": about} for c in cases}
    done = {ids[case]: found for case, found in cases.items()}
    return records_text(Records(plan=plan, done=done, starts=starts), KernelTimes())


def _by(measurements: Sequence[Measurement]) -> str:
    mine = fastest(measurements, ours=True)
    return mine["who"] if mine else "none of ours"


def _measurement(record: Mapping[str, Any], bundle: Mapping[str, Any]) -> dict[str, Any]:
    step = {"who": "device", "ours": True, "right": None, "bytes": 0} if record["kind"] == "step" else {}
    kept = ("who", "ours", "mode", "right", "us", "us_low", "us_high", "bytes")
    found = {name: value for name in kept if (value := step.get(name, record.get(name))) is not None or name == "right"}
    whole = {"copy_bytes_per_s": bundle["copy_bytes_per_s"]}
    return {"metric": "time", **found, **whole, "tiny": bundle["tiny"]}


if __name__ == "__main__":
    try:
        print(import_bundle(*map(Path, sys.argv[1:])))
    except (ConfigError, OSError, TypeError) as error:
        sys.exit(f"{error}")
