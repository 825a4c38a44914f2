"""Shared by all benchmarks: turns, medians, records, table, figure and JSON. Knows no engine.

Your own benchmark is a dataclass in a separate file, a subclass of `Bench` whose fields are its options;
`ksana bench package.module:Class` has an option for each field.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import name_of
from ksana_jax.lab.runs.machine_load import Compilations, Load
from ksana_jax.lab.runs.tasks.base import Results
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, of_metric

if TYPE_CHECKING:
    from ksana_jax.lab.runs.records import Records

# Share of processor time taken by other programs above which times are reported as disturbed.
BUSY = 0.05


def option(default: Any, help: str) -> Any:
    """Declares a field of a benchmark as an option of its command."""
    return dataclasses.field(default=default, metadata={"help": help})


class Unavailable(Exception):
    """The subject of a case is not installed; the message names it, and says how to get it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of a benchmark's table. point: its numbers by key, with the same keys in all cases; label: words, or ""."""

    label: str
    point: Mapping[str, Any]

    @property
    def name(self) -> str:
        return ", ".join([self.label] * bool(self.label) + [f"{key} {value}" for key, value in self.point.items()])


class Bench(Results):
    """A benchmark: a dataclass whose fields are options, each with a default.

    A repetition measures every case once, forwards and backwards alternately (A B C, C B A), so that a change
    in the machine's speed affects all alike. Unless `start` warms up everything, one more comes first and is not kept;
    `warming` is true meanwhile, and `measure` may then do less.
    """

    REPEATS: ClassVar[int] = 3  # unless told otherwise
    WARM_TURN: ClassVar[bool] = True  # whether an unrecorded repetition comes first
    warming: ClassVar[bool] = False

    @abc.abstractmethod
    def title(self) -> str:
        """Returns one line that describes the measurement, with the important options."""

    @abc.abstractmethod
    def cases(self) -> list[Case]:
        """Returns the rows of the table."""

    @abc.abstractmethod
    def start(self) -> None:
        """Checks the options, and builds and warms up the subject.

        Raises:
          ConfigError: an option is wrong.
        """

    def measure(self, case: Case) -> Measurement:
        """Measures a case once; returns plain values by key: times in seconds, `_s`, or rates, `_per_s`.

        Raises:
          Unavailable: it cannot be measured here.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither measure nor turn")

    def turn(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Measurement]]:
        """Measures cases once each and yields them in order; to be overridden if measuring them is interleaved."""
        for case in cases:
            yield case, self.measure(case)

    def processes(self) -> list[int]:
        """Returns the ids of other processes that belong to the measurement."""
        return []

    def close(self) -> None:
        """Undoes `start`."""

    # ------------------------------------------------------------------ results

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes medians over repetitions of every number, and of each (largest - smallest) / median as KEY_spread.

        Repetitions that compiled anything are excluded.
        """
        turns = [m for m in measurements if m["metric"] == "repetition" and not m["compilations"]]
        values: dict[str, list[float]] = {}
        for m in turns:
            for key, value in m.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool) and key not in _BOOKKEEPING:
                    values.setdefault(key, []).append(value)
        medians = {key: float(statistics.median(found)) for key, found in values.items()}
        spread = {
            f"{key}_spread": (max(found) - min(found)) / medians[key]
            for key, found in values.items()
            if len(found) > 1 and medians[key]
        }
        return medians | spread

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        """Describes the measurement, and reasons to doubt it."""
        machines, turns = of_metric(rows, "machine"), of_metric(rows, "repetition")
        absent: dict[str, dict[str, None]] = {}
        for row in rows:
            for m in of_metric([row], "absent"):
                absent.setdefault(m["reason"], {})[row.label or row.name] = None
        said = [f"{'; '.join(names)}: {reason}." for reason, names in absent.items()]
        if not turns:
            return said
        count = 1 + max(m["turn"] for m in turns)
        order = ", rows in turn, forwards and backwards alternately" if len(rows) > 1 else ""
        said.append(
            f"Medians of {count} repetitions{order}; spread: (largest - smallest) / median."
            if count > 1
            else "One repetition."
        )
        compiled = sum(m["compilations"] for m in turns)
        warm = "".join([f" of {m['warm_up_s']:,.0f} s" for m in machines[:1]])
        said.append(
            f"{compiled} compilations after a warm-up{warm}; repetitions with one of them are left out."
            if compiled
            else f"No compilation after a warm-up{warm}."
        )
        return [*said, *_machine_notes(machines, turns)]


_BOOKKEEPING = ("turn", "compilations", "load", "seconds")


def _machine_notes(machines: Sequence[Measurement], turns: Sequence[Measurement]) -> list[str]:
    said = [f"{m['cpu']}, {m['cores']} cores; Python {m['python']}, {m['packages']}." for m in machines[:1]]
    loads = [(m["load"], m["seconds"]) for m in turns if m["load"] is not None]
    if not loads:
        return [*said, "How busy the machine was is not known."]
    mean = sum(load * seconds for load, seconds in loads) / sum(seconds for _, seconds in loads)
    most = max(load for load, _ in loads)
    said.append(f"Other programs took {mean:.0%} of the processors' time, at worst {most:.0%}.")
    if mean >= BUSY:
        said.append("That is a busy machine: the times say little about an idle one.")
    return said


def spread(key: str) -> Column:
    """Returns the column of the spread of a key over the repetitions."""
    return Column(f"{key}_spread", "spread", lambda value: f"{value:.0%}")


# ---------------------------------------------------------------------- running


def run(bench: Bench, repeats: int = 3, clock: Callable[[], float] = time.perf_counter) -> tuple[Records, str]:
    """Runs a benchmark; returns its records, and the same as the text of a records file.

    Args:
      repeats: how often each case is measured, after one time that is not recorded.

    Raises:
      ConfigError: an option of the benchmark is wrong.
    """
    from ksana_jax.lab.runs.environment import environment

    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}, must be at least 1")
    cases, absent, began = bench.cases(), {}, clock()
    measured: dict[str, list[Measurement]] = {case.name: [] for case in cases}
    compilations = Compilations()
    try:
        bench.start()
        if bench.WARM_TURN:
            bench.warming = True  # pyright: ignore[reportAttributeAccessIssue]  of this object only
            collections.deque(_turn(bench, cases, absent), maxlen=0)
            bench.warming = False  # pyright: ignore[reportAttributeAccessIssue]
        where = {"metric": "machine", "warm_up_s": clock() - began, **_machine(environment())}
        for number in range(repeats):
            there = [case for case in cases if case.name not in absent]
            load, then = Load(bench.processes), clock()
            compilations.read()
            for case, found in _turn(bench, there if number % 2 == 0 else there[::-1], absent):
                now, kept = clock(), {"turn": number, "compilations": compilations.read(), "load": load.read()}
                measured[case.name].append({"metric": "repetition", **kept, "seconds": now - then, **found})
                then = clock()
    finally:
        compilations.close()
        bench.close()
    for name, reason in absent.items():
        measured[name].append({"metric": "absent", "reason": reason})
    return _records(bench, cases, {name: [where, *found] for name, found in measured.items()}, environment())


def _turn(bench: Bench, cases: Sequence[Case], absent: dict[str, str]) -> Iterator[tuple[Case, Measurement]]:
    """Measures cases once, and records the absent ones."""
    left = list(cases)
    while left:
        try:
            for case, found in bench.turn(left):
                left = left[left.index(case) + 1 :]
                yield case, found
            return
        except Unavailable as error:
            absent[left.pop(0).name] = str(error)


def _machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    versions = {name: environment["packages"].get(name) for name in ("jax", "jaxlib", "numpy")}
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    device = {} if environment["backend"] == "cpu" else {"device": environment["device"]}
    return {**{key: environment[key] for key in ("cpu", "cores", "python")}, "packages": packages, **device}


def _records(
    bench: Bench, cases: Sequence[Case], measured: Mapping[str, Sequence[Measurement]], environment: dict[str, Any]
) -> tuple[Records, str]:
    from ksana_jax.lab.runs.records import Records
    from ksana_jax.lab.runs.report import records_text

    task = name_of(type(bench))
    settings = {field.name: getattr(bench, field.name) for field in dataclasses.fields(bench)}  # pyright: ignore[reportArgumentType]
    configs = {c.name: {"task": task, "settings": settings, "label": c.label, "point": dict(c.point)} for c in cases}
    texts = {name: json.dumps(config, sort_keys=True) for name, config in configs.items()}
    ids = {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in texts.items()}
    rows = [{"label": case.label, "point": dict(case.point), "trials": [ids[case.name]]} for case in cases]
    name = f"bench-{type(bench).__module__.rpartition('.')[2].replace('_', '-')}"
    plan = {"name": name, "title": bench.title(), "task": task, "rows": rows, "time": time.time()}
    starts = {
        ids[case]: {"trial": ids[case], "config": json.loads(texts[case]), "environment": environment}
        for case in measured
    }
    done = {ids[case]: list(found) for case, found in measured.items()}
    records = Records(plan=plan, done=done, starts=starts)
    return records, records_text(records, bench)
