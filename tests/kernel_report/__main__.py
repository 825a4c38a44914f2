"""Compiles the kernels, and whole steps of the engine, for an absent GPU: needs the extra aot-gpu.

python -m tests.kernel_report --target h200 [--only REGEX] [--json [PATH]]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pallas_kernels import aot
from tests.kernel_report.check import Case, check, compile_case, find_cases, row_of


def _compile_here(case: Case, target: aot.Target, folder: Path) -> None:
    """Writes the rows of a case for the process that asked for them."""
    try:
        rows = compile_case(case, target, folder)
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        rows = [row_of(case, [f"{type(error).__name__}: {reason[:300]}"])]
    (folder / "rows.json").write_text(json.dumps(rows))


def main(argv: list[str] | None = None) -> int:
    """The command. Exit status 1: something failed; 2: it could not begin."""
    parser = argparse.ArgumentParser(
        "python -m tests.kernel_report", description="Compiles kernels and whole steps for a GPU that is absent."
    )
    parser.add_argument("--target", default="h200", choices=aot.targets(), help="a100: Triton kernels only")
    parser.add_argument("--only", default="", metavar="REGEX", help='cases with it in "name key=value ..."')
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="PATH", help="write one JSON object; - ends stdout with it"
    )
    parser.add_argument("--jobs", type=int, help="processes at once")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)  # the process of one case
    args = parser.parse_args(argv)
    if args.case:
        source, index, folder = args.case
        target = aot.target(args.target)
        _compile_here(find_cases(target, [source])[int(index)][2], target, Path(folder))
        return 0
    if line := aot.missing():
        print(line, file=sys.stderr)
        return 2
    try:
        found = check(args.target, only=args.only, jobs=args.jobs)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json == "-":
        print(json.dumps(found))
    elif args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    return int(found["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
