"""The table of the documentation of programs that several devices divide, from reports of `ksana kernels check`.

ksana kernels check --target h200 --only devices= --json | tail -1 > h200.json
python -m ksana_jax.devkit.compile_check.table h200.json v5e.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ksana_jax.core.units import byte_size
from ksana_jax.devkit.compile_check.targets import memory_bytes_of

HEADS = ("program", "devices", "arguments", "temporaries", "memory", "exchanged")


def table(reports: Iterable[Mapping[str, Any]]) -> str:
    """Returns the rows with devices of reports, as `--json` prints them, as a Markdown table."""
    found: dict[str, tuple[str, ...]] = {}
    for report in reports:
        target = report["target"]
        for row in report["kernels"]:
            if "devices" in row["config"] and row["reason"] is None:
                found.setdefault(f"{target} {row['name']} {row['config']}", _cells(target, row))
    lines = ["| " + " | ".join(HEADS) + " |", "| --- | ---: | ---: | ---: | ---: | --- |"]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in found.values())])


def _cells(target: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    config = row["config"]
    tokens = f"{config['rows']} rows" + (f", {config['tiles']} tiles of prompts" if config.get("tiles") else "")
    crossing = "; ".join(f"{c['number']} {c['kind']} of {byte_size(c['bytes'])}" for c in row["collectives"])
    sizes = (byte_size(row[key]) for key in ("argument_bytes", "temp_bytes"))
    memory = f"{memory_bytes_of(target) / 2**30:,.0f} GiB"
    return (f"{row['name']}, {tokens}", f"{config['devices']} {target}", *sizes, memory, crossing)


if __name__ == "__main__":
    print(table(json.loads(Path(path).read_text()) for path in sys.argv[1:]))
