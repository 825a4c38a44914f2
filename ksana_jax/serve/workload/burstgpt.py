"""Reads BurstGPT: CSV with Timestamp (seconds), Request tokens, Response tokens, Log Type, and more columns."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterator

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.workload.trace import TraceRow, TraceWorkload, csv_rows, tokens_of

_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BurstGPT(TraceWorkload):
    """A BurstGPT trace. Rows with 0 response tokens are requests that failed, and are left out.

    Args:
      log_type: takes only rows with this "Log Type", such as "API log"; None takes all.

    Source: arXiv:2401.17644.
    """

    log_type: str | None = None

    def rows(self, lines: io.TextIOBase) -> Iterator[TraceRow]:
        needed = _COLUMNS + ("Log Type",) * (self.log_type is not None)
        for where, row in csv_rows(self.path, lines, needed):
            if self.log_type is not None and row["Log Type"].strip() != self.log_type:
                continue
            time_s = _seconds(where, row["Timestamp"])
            prompt = tokens_of(where, "Request tokens", row["Request tokens"], 0)
            output = tokens_of(where, "Response tokens", row["Response tokens"], 0)
            if prompt and output:
                yield TraceRow(time_s, prompt, output)

    def skipped(self) -> str | None:
        return "rows without request or response tokens, which failed, are left out"


def _seconds(where: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{where}: Timestamp is {checks.shown(text)}, must be a number of seconds")
    return value
