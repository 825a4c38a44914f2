"""Reads the Azure LLM inference traces of 2023 and 2024: CSV with TIMESTAMP, ContextTokens, GeneratedTokens."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from datetime import UTC, datetime

from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.workload.trace import TraceRow, TraceWorkload, csv_rows, tokens_of

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Azure(TraceWorkload):
    """An Azure trace. Its prompts share nothing: the trace has lengths only.

    Source: Splitwise, arXiv:2311.18677; DynamoLLM, arXiv:2408.00741 (2024).
    """

    def rows(self, lines: io.TextIOBase) -> Iterator[TraceRow]:
        for where, row in csv_rows(self.path, lines, _COLUMNS):
            prompt = tokens_of(where, "ContextTokens", row["ContextTokens"])
            output = tokens_of(where, "GeneratedTokens", row["GeneratedTokens"])
            yield TraceRow(_seconds(where, row["TIMESTAMP"]), prompt, output)


def _seconds(where: str, text: str) -> float:
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        example = "2023-11-16 18:15:46.6805900"
        raise ConfigError(f"{where}: TIMESTAMP is {text!r:.60}, must be a time such as {example}") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
