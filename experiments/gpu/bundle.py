"""Packs a run into one file that `experiments.gpu.importing` reads: records, device and versions. No jax.

Left out: names of host and user, absolute paths, and the lines that sections printed last.
"""

from __future__ import annotations

import getpass
import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.gpu.importing import KIND, SCHEMA_VERSION
from ksana_jax.core.files import write_atomic

# Files that `write` makes.
NAMED = "gpu-*-*.json"
# Keys that identify a record; replacing names of users and hosts leaves them alone.
_NAMES = frozenset("section kind name metric case who mode device_kind".split())
# Keys of a fact itself; `Context.record`.
_FACT = frozenset("section kind name run".split())
# Keys that identify a host: a hash of its name, and its kernel.
_DROPPED = frozenset(("machine", "platform"))
# Two or more components, as in "/home/anna/ptxas", also after "=", ":" or quotes; paths of URLs do not match.
_PATH = re.compile(r"(?<![\w.)\]/])(?:file://)?~?/(?!/)(?:[\w.@+~-]+/)+([\w.@+~-]*)")


def make(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the bundle of `driver.run_all`'s results."""
    records = results["records"]
    facts = {r["name"]: r for r in records if r["kind"] == "fact" and "name" in r}
    smi = (str(facts.get("nvidia-smi", {}).get("answer", "")).splitlines() or [""])[-1].split(", ")
    versions = {**facts.get("environment", {}).get("packages", {}), **facts.get("packages", {})}
    packages = {name: version for name, version in versions.items() if isinstance(version, str) and name not in _FACT}
    copy = next((r["value"] for r in records if r["kind"] == "value" and r["metric"] == "copy bandwidth"), None)
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "started": results["started"],
        "tiny": "--tiny" in results["options"],
        "device": facts.get("device", {}).get("device_kind"),
        "driver": smi[1] if len(smi) > 1 else None,
        "ptxas": _ptxas(facts.get("compilers", {})),
        "packages": packages,
        "copy_bytes_per_s": copy and copy * 1e12,
        "sections": {name: {k: s[k] for k in ("status", "seconds")} for name, s in results["sections"].items()},
        "records": scrub(records),
    }


def write(results: Mapping[str, Any], folder: Path) -> Path:
    """Writes the bundle of results to a folder, named after device and time; returns its path."""
    bundle = make(results)
    device = re.sub(r"[^a-z0-9]+", "-", str(bundle["device"]).lower()).strip("-")
    path = folder / f"gpu-{device}-{re.sub(r'[^0-9TZ]', '', bundle['started'])}.json"
    write_atomic(path, json.dumps(bundle, indent=1) + "\n")
    return path


def _ptxas(compilers: Mapping[str, Any]) -> str | None:
    """Returns the version of the ptxas that Mosaic GPU takes: "13.5" of "Build cuda_13.5.r13.5/compiler.39125733_0"."""
    lines = compilers.get("ptxas", {}).get(compilers.get("mosaic"), ())
    found = re.search(r"cuda_([\d.]+)\.r", " ".join(lines))
    return found.group(1) if found else None


def scrub(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns records without absolute paths and without the names of this host and its user."""
    names = {getpass.getuser(), Path.home().name, platform.node(), platform.node().partition(".")[0]}
    # "root" and the like say nothing of the person who runs this. A name comes before its own prefixes.
    private = [
        re.escape(name)
        for name in sorted(names, reverse=True)
        if len(name) > 2 and name not in ("root", "user", "localhost")
    ]
    of_names = re.compile(rf"(?<!\w)(?:{'|'.join(private)})(?!\w)") if private else None

    def text(value: str) -> str:
        value = _PATH.sub(lambda path: f"…/{path[1]}" if re.search(r"\w\.\w|^ptxas$", path[1]) else "…", value)
        return of_names.sub("…", value) if of_names else value

    return [_each(record, text) for record in records]


def _each(value: Any, text: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for key, inner in value.items():
            if key not in _DROPPED:
                name = text(key)
                # Two paths may have become alike.
                name = name if name not in found else f"{name} ({len(found)})"
                found[name] = inner if key in _NAMES else _each(inner, text)
        return found
    return [_each(x, text) for x in value] if isinstance(value, (list, tuple)) else value
