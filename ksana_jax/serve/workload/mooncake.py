"""Reads Mooncake traces: JSON lines with timestamp (ms), input_length, output_length and hash_ids."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
from collections.abc import Callable, Iterator

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.workload.tokens import key_of, stream, streams
from ksana_jax.serve.workload.trace import TraceRow, TraceWorkload, tokens_of

BLOCK_TOKENS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mooncake(TraceWorkload):
    """A Mooncake trace. A hash id names a block of 512 tokens; requests whose chains of ids begin alike share a prefix.

    The tokens of a block are a function of its id and the seed of texts. The last block of a prompt, if it is not full,
    is the request's own.

    Args:
      length_scale: also scales the blocks, which must remain a whole number of tokens (1/4: 128).

    Source: Mooncake, FAST'25, arXiv:2407.00079.
    """

    def check(self) -> None:
        super().check()
        if not (BLOCK_TOKENS * self.length_scale).is_integer():
            raise ConfigError(
                f"Mooncake: length_scale is {self.length_scale:g}, which makes blocks of "
                f"{BLOCK_TOKENS * self.length_scale:g} tokens: they must be whole"
            )

    @property
    def block_tokens(self) -> int:
        """Number of tokens that a hash id stands for."""
        return int(BLOCK_TOKENS * self.length_scale)

    def rows(self, lines: io.TextIOBase) -> Iterator[TraceRow]:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _row(f"{self.path}, line {number}", line)

    def prompt_tokens(
        self, row: TraceRow, index: int, num_prompt: int, vocab_size: int
    ) -> Callable[[], np.ndarray] | None:
        full = row.hash_ids[: min(row.num_prompt // BLOCK_TOKENS, num_prompt // self.block_tokens)]
        return functools.partial(_prompt, self.seed_of_texts, full, self.block_tokens, index, num_prompt, vocab_size)


def _row(where: str, line: str) -> TraceRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: {checks.shown(row)}, must be an object")
    if missing := [name for name in ("timestamp", "input_length", "output_length", "hash_ids") if name not in row]:
        raise ConfigError(f"{where}: there is no field {missing[0]!r}")
    checks.require(checks.number(f"{where}: timestamp", row["timestamp"], 0), error=ConfigError)
    prompt = tokens_of(where, "input_length", row["input_length"])
    output = tokens_of(where, "output_length", row["output_length"])
    ids, needed = row["hash_ids"], -(-prompt // BLOCK_TOKENS)
    if not isinstance(ids, list) or not all(checks.is_integer(i) and 0 <= i < 2**63 for i in ids):
        raise ConfigError(f"{where}: hash_ids is {checks.shown(ids)}, must be a list of integers from 0")
    if len(ids) != needed:
        raise ConfigError(f"{where}: hash_ids has {len(ids):,} ids, input_length {prompt:,} needs {needed:,}")
    return TraceRow(row["timestamp"] / 1000, prompt, output, tuple(ids))


def _prompt(seed: int, ids: tuple[int, ...], size: int, index: int, num_prompt: int, vocab_size: int) -> np.ndarray:
    blocks = streams(key_of("block", seed), np.array(ids, np.int64), size, vocab_size).reshape(-1)
    rest = stream(key_of("last block", seed, index), 0, num_prompt - len(blocks), vocab_size)
    return np.concatenate([blocks, rest])
