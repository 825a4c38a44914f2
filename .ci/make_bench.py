"""`make bench`: the benchmarks whose tables docs/use/benchmarks.md shows, in at most 20 minutes.

    python .ci/make_bench.py [--out runs/bench] [--peers .venv-peers] [--minutes 20] [--resume]
                             [--readme docs/use/benchmarks.md]

Each is run into a separate folder; performance.md has their tables. With --resume, those that --out already has with
the same options are not run again, so that benchmarks left out for time, or interrupted, can follow later.
With --readme, the part of that file between `<!-- performance -->` and `<!-- /performance -->` is replaced by a
summary.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.files import write_atomic
from ksana_jax.core.plugins import resolve
from ksana_jax.lab.bench import BENCHES
from ksana_jax.lab.bench.command import run_and_show
from ksana_jax.lab.bench.core import Bench
from ksana_jax.lab.runs.records import read
from ksana_jax.lab.runs.report import Report, read_report
from ksana_jax.lab.runs.tables import markdown

BEGIN, END = "<!-- performance -->", "<!-- /performance -->"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A benchmark of the suite. minutes: its maximum on two idle cores, peers included.

    table: whether the summary has its table, or only its conclusion.
    """

    folder: str
    bench: str
    minutes: float
    options: dict[str, Any]
    repeats: int = 1
    peers: bool = False
    table: bool = False


THROUGHPUT = "experiments.benches.throughput:PeerThroughput"


def _throughput(model: str, dtype: str, minutes: float, repeats: int, only: tuple[str, ...] = ()) -> Entry:
    options = {"model": model, "dtype": dtype, "requests": (32, 1), "only": only}
    return Entry(f"{model}-{dtype}", THROUGHPUT, minutes, options, repeats, peers=True, table=True)


# The most important come first: what exceeds the time limit is left out. With bench-m, transformers alone takes as
# long as all the rest together.
FASTEST = ("vLLM", "llama.cpp")
SUITE = (
    _throughput("bench-s", "f32", 2.5, 2),
    _throughput("bench-s", "bf16", 2, 2),
    Entry(
        "host",
        "experiments.benches.host:Host",
        1.5,
        {"rows": (32, 256, 1024, 4096), "prefix_cache": "both"},
        peers=True,
        table=True,
    ),
    Entry(
        "scheduling",
        "experiments.benches.scheduling:Scheduling",
        3,
        {"requests": 24, "loads": (0.05, 0.15, 0.3, 0.6, 1.0)},
    ),
    Entry("tokens-in-forward", "experiments.benches.tokens_in_forward:TokensInForward", 2, {}, 2),
    Entry("latency", "latency", 1.5, {}, 2),
    _throughput("bench-m", "bf16", 3, 1, FASTEST),
    _throughput("bench-m", "f32", 4, 1, FASTEST),
)


def run_suite(
    out: Path,
    peers: str,
    minutes: float,
    resume: bool = False,
    entries: Sequence[Entry] = SUITE,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[tuple[Entry, Report]], list[Entry]]:
    """Runs the entries that fit the time; returns their reports, and the entries left out.

    Args:
      resume: entries that `out` already has with the same options are read instead.
    """
    began, made, left_out = clock(), [], []
    for entry in entries:
        options = entry.options | ({"peers": peers} if entry.peers else {})
        bench, folder = resolve(entry.bench, BENCHES, "bench")(**options), out / entry.folder
        if resume and _has(folder, bench, entry.repeats):
            print(f"== {entry.folder}: kept from {folder}", flush=True)
            made.append((entry, read_report(folder, None)))
        elif (passed := (clock() - began) / 60) + entry.minutes > minutes:
            left_out.append(entry)
        else:
            print(f"== {entry.folder}: up to {entry.minutes:g} min., begun after {passed:.1f}", flush=True)
            made.append((entry, run_and_show(bench, repeats=entry.repeats, out=folder, as_json=False)))
    return made, left_out


def _has(folder: Path, bench: Bench, repeats: int) -> bool:
    """True if a folder has records of a benchmark with the same options and repetitions."""
    try:
        records = read(folder)
    except FileNotFoundError:
        return False
    settings = json.loads(json.dumps(dataclasses.asdict(bench)))  # pyright: ignore[reportArgumentType]  a dataclass
    turns = {len({m["turn"] for m in found if "turn" in m}) for found in records.done.values()}
    same = all(start["config"]["settings"] == settings for start in records.starts.values())
    return same and len(records.done) == len(bench.cases()) and turns - {0} == {repeats}


def performance(made: Sequence[tuple[Entry, Report]], left_out: Sequence[Entry]) -> str:
    """Returns all tables with their notes, as Markdown."""
    tables = [
        markdown(r.title, r.rows, r.columns, [r.conclusion, *r.notes] if r.conclusion else r.notes) for _, r in made
    ]
    return "\n".join(["# Performance\n", *tables, *_missing(left_out)])


def summary(made: Sequence[tuple[Entry, Report]], left_out: Sequence[Entry]) -> str:
    """Returns the text of docs/use/benchmarks.md: some tables, conclusions of others, and how they were measured."""
    parts, said = [], set()
    for entry, report in made:
        if entry.table:
            title, *table = markdown(report.title, report.rows, report.columns, []).splitlines()
            parts.append("\n".join([f"**{title.removeprefix('## ')}**", *table, "", report.conclusion]).rstrip())
            # Notes common to all are printed once, the machine's load for each.
            notes = [note for note in report.notes if note not in said or note.startswith(("Other", "That"))]
            said.update(notes)
            parts.append("  \n".join(notes))
        elif report.conclusion:
            busy = [note for note in report.notes if note.startswith(("Other", "That"))]
            parts.append(f"**{report.title}.** {' '.join([report.conclusion, *busy])}")
    return "\n\n".join([*filter(None, parts), *_missing(left_out)]) + "\n"


def _missing(left_out: Sequence[Entry]) -> list[str]:
    names = ", ".join(entry.folder for entry in left_out)
    return [f"Not measured, for want of time: {names}."] if names else []


def replace_between(text: str, summary: str) -> str:
    """Replaces the text between the two marks.

    Raises:
      ConfigError: the text lacks one mark of each kind, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ConfigError(f"the file must have {BEGIN} and {END} once each, in this order")
    return f"{before}{BEGIN}\n{summary}{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=".ci/make_bench.py", description="Runs the benchmarks of docs/use/benchmarks.md."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the results")
    parser.add_argument("--peers", default=".venv-peers", help="environment of other engines; see `make peers`")
    parser.add_argument("--minutes", type=float, default=20, help="time that all may take")
    parser.add_argument("--resume", action="store_true", help="do not run again what --out has with the same options")
    parser.add_argument("--readme", type=Path, help="file whose part between the marks is replaced")
    args = parser.parse_args()
    readme = "" if args.readme is None else args.readme.read_text(encoding="utf-8")
    if args.readme is not None:
        try:
            replace_between(readme, "")  # an error after all benchmarks would come too late
        except ConfigError as error:
            parser.error(f"{args.readme}: {error}")
    made, left_out = run_suite(args.out, args.peers, args.minutes, args.resume)
    write_atomic(args.out / "performance.md", performance(made, left_out))
    print(f"{args.out}: performance.md")
    if args.readme is not None:
        write_atomic(args.readme, replace_between(readme, summary(made, left_out)))


if __name__ == "__main__":
    main()
