"""Stores the predictions of the model of speed, and writes the table of the README.

    python -m pallas_kernels.speed.update [--show]

Compiles the cases that have a model, about a minute, and shows each number before and after. Whole steps are the
engine's; it has to be installed beside the kernels.
"""

from __future__ import annotations

import argparse
import json
import sys

from pallas_kernels.aot import check
from pallas_kernels.speed import baseline

# Steps are of the engine, which the kernels do not import.
SOURCES = (*check.SOURCES, "ksana_jax.devkit.compile_check.kernels:cases")


def main(argv: list[str] | None = None) -> int:
    """The command. Exit status 1: a case was not compiled; nothing is stored then."""
    parser = argparse.ArgumentParser("python -m pallas_kernels.speed.update", description="Stores predictions.")
    parser.add_argument("--show", action="store_true", help="show what has changed, and store nothing")
    args = parser.parse_args(argv)
    found = check.check("h200", chosen=lambda case: case.speed is not None, sources=SOURCES, show=lambda line: None)
    rows = found["kernels"]
    if broken := [f"{baseline.key(row)}: {row['reason']}" for row in rows if not row.get("predictions")]:
        print(*broken, sep="\n", file=sys.stderr)
        return 1
    new, old = baseline.entries(rows), baseline.stored()
    if old["versions"] != baseline.versions():
        print(f"stored: {old['versions']}; these compilers: {baseline.versions()}")
    print(*(baseline.changes(new, old["cases"]) or ["nothing has changed"]), sep="\n")
    if not args.show:
        stored = {"versions": baseline.versions(), "cases": new, "steps": found["steps"]}
        baseline.PATH.write_text(json.dumps(stored, indent=1) + "\n")
        baseline.README.write_text(baseline.with_tables(baseline.README.read_text(), stored))
    return 0


if __name__ == "__main__":
    sys.exit(main())
