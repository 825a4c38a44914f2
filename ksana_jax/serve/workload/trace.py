"""Shared by readers of published traces. Traces are the user's files; none is shipped."""

from __future__ import annotations

import abc
import csv
import dataclasses
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.files import open_to_read
from ksana_jax.serve.workload.arrivals import generator
from ksana_jax.serve.workload.base import Encode, WorkloadSettings
from ksana_jax.serve.workload.items import Workload

MAX_TOKENS = 10**8


class TraceRow(NamedTuple):
    """One request of a trace: seconds on any clock, and tokens. hash_ids: names of its blocks of text, if any."""

    time_s: float
    num_prompt: int
    num_output: int
    hash_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceWorkload(WorkloadSettings):
    """A trace with one request a row. Base of the readers.

    Args:
      path: the file.
      rate: requests per second, to which gaps are scaled; None keeps the times of the trace.
      jitter_s: maximum seconds, drawn uniformly, that are added to each time. Many traces round times to seconds,
        which makes bursts that the traffic did not have.
      length_scale: factor for all lengths, to replay a trace on a small model.
    """

    num_requests: int | None = None
    path: str = ""
    rate: float | None = None
    jitter_s: float = 0.0
    length_scale: float = 1.0

    def check(self) -> None:
        name = type(self).__name__
        checks.require(
            None if isinstance(self.path, str) and self.path else f"{name}: path is {self.path!r}, must name a file",
            checks.number(f"{name}: rate", self.rate, above=0, optional=True),
            checks.number(f"{name}: jitter_s", self.jitter_s, 0),
            checks.number(f"{name}: length_scale", self.length_scale, above=0, high=1000),
            error=ConfigError,
        )

    @property
    def label(self) -> str:
        return self.name or Path(self.path).stem

    @abc.abstractmethod
    def rows(self, lines: io.TextIOBase) -> Iterator[TraceRow]:
        """Yields the requests of a file in its order, reading no further than it is asked to.

        Raises:
          ConfigError: a line is not as the format says; names the file, the line and the field.
        """

    def skipped(self) -> str | None:
        """Says which rows the reader leaves out, for the workload's notes."""
        return None

    def prompt_tokens(
        self, row: TraceRow, index: int, num_prompt: int, vocab_size: int
    ) -> Callable[[], np.ndarray] | None:
        """Returns what makes a row's prompt; None gives it a text of its own."""
        return None

    def _make(self, vocab_size: int, encode: Encode | None) -> Workload:
        rows = self.read()
        times = np.array([row.time_s for row in rows])
        times = times - times.min() + generator(self.seed, "jitter").random(len(rows)) * self.jitter_s
        order = np.argsort(times, kind="stable")
        rows, times = [rows[i] for i in order.tolist()], times[order] - times.min()
        lengths = np.array([[row.num_prompt, row.num_output] for row in rows])
        lengths = np.maximum(np.rint(lengths * self.length_scale).astype(np.int64), 1)
        prompts, outputs, notes = self.cut(lengths[:, 0], lengths[:, 1])
        texts = [self.prompt_tokens(row, i, n, vocab_size) for i, (row, n) in enumerate(zip(rows, prompts.tolist()))]
        own = None if None in texts else texts
        items = self.singles(vocab_size, times, prompts, outputs, own)  # pyright: ignore[reportArgumentType]
        notes += [said] if (said := self.skipped()) else []
        found = Workload(self.label, self.seed, items, tuple(notes))
        return found if self.rate is None else found.scaled(self.rate)

    def read(self) -> list[TraceRow]:
        """Returns the first num_requests rows.

        Raises:
          ConfigError: the file cannot be read, or has no requests.
        """
        with opened(self.path) as lines:
            found: list[TraceRow] = []
            for row in self.rows(lines):
                found.append(row)
                if len(found) == self.num_requests:
                    break
        if not found:
            raise ConfigError(f"{self.path} has no requests")
        return found


class opened:
    """A text file as a context; what cannot be opened or is not UTF-8 is a ConfigError with its name."""

    def __init__(self, path: str):
        self.path = path

    def __enter__(self) -> io.TextIOWrapper:
        try:
            self._file = io.TextIOWrapper(open_to_read(Path(self.path)), encoding="utf-8-sig", newline="")
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror or error}") from None
        return self._file

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        self._file.close()
        if isinstance(error, UnicodeDecodeError):
            raise ConfigError(f"{self.path} is not a text in UTF-8: {error.reason}") from None


def csv_rows(path: str, lines: io.TextIOBase, needed: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields (where it is, for messages; {column: text}) for each row of a CSV file whose first line names columns.

    Raises:
      ConfigError: a needed column is missing, or a row has another number of fields.
    """
    reader = csv.reader(lines)
    try:
        columns = [name.strip() for name in next(reader, [])]
        if missing := [name for name in needed if name not in columns]:
            raise ConfigError(
                f"{path}, line 1: there is no column {missing[0]!r}; it has {', '.join(columns) or 'none'}"
            )
        for fields in reader:
            if fields:
                where = f"{path}, line {reader.line_num}"
                if len(fields) != len(columns):
                    raise ConfigError(f"{where}: {len(fields)} fields, line 1 names {len(columns)}")
                yield where, dict(zip(columns, fields, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}") from None


def tokens_of(where: str, name: str, value: object, low: int = 1) -> int:
    """Returns a number of tokens, given as an integer or as its text.

    Raises:
      ConfigError: it is not an integer from `low` to 10^8.
    """
    number = value
    if isinstance(value, str) and value.strip().isdecimal():
        number = int(value) if len(value) < 20 else value
    checks.require(checks.integer(f"{where}: {name}", number, low, MAX_TOKENS), error=ConfigError)
    return number  # pyright: ignore[reportReturnType]
