"""Reads ShareGPT: a JSON list of conversations, [{"conversations": [{"from": "human", "value": "..."}, ...]}]."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.workload.arrivals import arrivals
from ksana_jax.serve.workload.base import Encode, WorkloadSettings
from ksana_jax.serve.workload.items import WorkItem, Workload, asked_for
from ksana_jax.serve.workload.tokens import FIRST_TOKEN, key_of
from ksana_jax.serve.workload.trace import opened

_USERS, _MODELS = ("human", "user"), ("gpt", "chatgpt", "bing", "bard", "assistant")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShareGPT(WorkloadSettings):
    """First questions and answers of ShareGPT's conversations; texts, not only lengths.

    The file has no times: they are drawn. Every run sends the same texts, whatever the seeds.

    Args:
      path: the file.
      rate: requests per second; None sends all at once. cv: of the gaps, see `Synthetic`.
    """

    num_requests: int | None = None
    path: str = ""
    rate: float | None = 1.0
    cv: float = 1.0

    def check(self) -> None:
        checks.require(
            None if isinstance(self.path, str) and self.path else f"ShareGPT: path is {self.path!r}, must name a file",
            checks.number("ShareGPT: rate", self.rate, above=0, optional=True),
            checks.number("ShareGPT: cv", self.cv, 0, 100),
            error=ConfigError,
        )

    @property
    def label(self) -> str:
        return self.name or Path(self.path).stem

    def _make(self, vocab_size: int, encode: Encode | None) -> Workload:
        pairs = [pair for pair in self._pairs()][: self.num_requests]
        if not pairs:
            raise ConfigError(f"{self.path} has no question with an answer")
        encode = encode or functools.partial(_counted, vocab_size)
        prompts = [np.asarray(encode(question), np.int32)[: self.max_prompt] for question, _ in pairs]
        answers = [np.asarray(encode(answer), np.int32)[: self.max_output] for _, answer in pairs]
        kept = [i for i in range(len(pairs)) if len(prompts[i]) and len(answers[i])]
        times, clients = arrivals(self.seed, len(kept), self.rate, self.cv), self.client_names(len(kept))
        items = []
        for index, i in enumerate(kept):
            output, max_tokens = asked_for(len(answers[i]), self.max_tokens, self.oracle)
            prompt, answer = functools.partial(np.copy, prompts[i]), functools.partial(np.copy, answers[i][:output])
            items.append(
                WorkItem(
                    index, float(times[index]), len(prompts[i]), output, max_tokens, prompt, answer, clients[index]
                )
            )
        return Workload(self.label, self.seed, items)

    def _pairs(self) -> Iterator[tuple[str, str]]:
        with opened(self.path) as file:
            try:
                found = json.load(file)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{self.path}, line {error.lineno}: not JSON: {error.msg}") from None
            except RecursionError:
                raise ConfigError(f"{self.path}: nested too deeply to be read") from None
        if not isinstance(found, list):
            raise ConfigError(f"{self.path}: must be a list of conversations")
        for number, entry in enumerate(found, 1):
            where = f"{self.path}, conversation {number}"
            turns = entry.get("conversations") if isinstance(entry, Mapping) else None
            if not isinstance(turns, list):
                raise ConfigError(f"{where}: there is no list 'conversations'")
            said = [_turn(f"{where}, turn {k}", turn) for k, turn in enumerate(turns, 1)]
            first = next((k for k, (who, _) in enumerate(said) if who in _USERS), len(said))
            if first + 1 < len(said) and said[first + 1][0] in _MODELS:
                yield said[first][1], said[first + 1][1]


def _turn(where: str, turn: Any) -> tuple[str, str]:
    for name in ("from", "value"):
        value = turn.get(name) if isinstance(turn, Mapping) else None
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {name!r} is {checks.shown(value)}, must be a text")
    return turn["from"], turn["value"]


def _counted(vocab_size: int, text: str) -> list[int]:
    """Stands in for a tokenizer: one token for four characters, the same for the same four."""
    pieces = (text[i : i + 4] for i in range(0, len(text), 4))
    return [FIRST_TOKEN + key_of("text", piece) % (vocab_size - FIRST_TOKEN) for piece in pieces]
