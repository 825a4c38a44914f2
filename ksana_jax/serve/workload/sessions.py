"""Conversations: turns that repeat all that was said before, after a system prompt that many share.

The text of a session is one stream of tokens: what the user says, the answer, what the user says next. A turn's prompt
is the system prompt and the stream up to there, so an answer is a function of session and position. An executor that
gives the answer of `WorkItem.output_tokens` leaves blocks in its cache that the next turn finds; a real model gives
another answer, and the next turn then finds the prompt of the one before.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.workload.arrivals import arrivals, generator
from ksana_jax.serve.workload.base import Encode, WorkloadSettings
from ksana_jax.serve.workload.items import WorkItem, Workload, asked_for
from ksana_jax.serve.workload.lengths import read_lengths
from ksana_jax.serve.workload.tokens import key_of, stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sessions(WorkloadSettings):
    """Conversations of several turns that share system prompts.

    Args:
      rate: requests per second, all turns counted; None begins all sessions at once.
      cv: coefficient of variation of the gaps between first turns; see `Synthetic`.
      turns: mean number of turns of a session, geometrically distributed, at least 1. A session also ends before a turn
        whose prompt would be longer than max_prompt.
      think_s: mean seconds from the end of an answer to the next turn, exponentially distributed.
      num_systems: number of system prompts. zipf: the k-th is used with a frequency of 1 / k**zipf.
      system: tokens of a system prompt. user: tokens that a turn adds. output: tokens of an answer. All as in
        `lengths.read_lengths`.
      hit_rate: fraction of prompt tokens that a prefix cache without a limit would have, which system prompts are
        scaled to give; None leaves them as they are.
    """

    num_requests: int = 1000  # pyright: ignore[reportIncompatibleVariableOverride]
    rate: float | None = 1.0
    cv: float = 1.0
    turns: float = 4.0
    think_s: float = 10.0
    num_systems: int = 10
    zipf: float = 1.0
    system: Any = 256
    user: Any = 64
    output: Any = 128
    hit_rate: float | None = None

    def check(self) -> None:
        checks.require(
            checks.integer("Sessions: num_requests", self.num_requests),
            checks.number("Sessions: rate", self.rate, above=0, optional=True),
            checks.number("Sessions: cv", self.cv, 0, 100),
            checks.number("Sessions: turns", self.turns, 1, 10_000),
            checks.number("Sessions: think_s", self.think_s, 0),
            checks.integer("Sessions: num_systems", self.num_systems, 1, 10**6),
            checks.number("Sessions: zipf", self.zipf, 0, 10),
            checks.number("Sessions: hit_rate", self.hit_rate, above=0, below=1, optional=True),
            error=ConfigError,
        )
        for name in ("system", "user", "output"):
            read_lengths(f"Sessions: {name}", getattr(self, name))

    def _make(self, vocab_size: int, encode: Encode | None) -> Workload:
        drawn = self._draw()
        notes = []
        if self.hit_rate is not None:
            drawn = drawn.with_systems(_solved(drawn, self.hit_rate))
        if self.max_prompt is not None:
            kept = drawn.prompts() <= self.max_prompt
            # Within a session prompts only grow, so its turns are kept up to one of them.
            if not kept[drawn.turn == 0].any():
                raise ConfigError(f"Sessions: max_prompt is {self.max_prompt:,}, shorter than every first turn")
            if count := int((~kept).sum()):
                notes.append(f"{count:,} of {len(kept):,} turns left out, longer than {self.max_prompt:,} tokens")
            drawn = drawn.keep(kept)
        return Workload(self.label, self.seed, self._items(drawn, vocab_size), tuple(notes))

    def _draw(self) -> _Turns:
        """Draws sessions until they have num_requests turns; the last is cut off there."""
        count, seed = self.num_requests, self.seed
        lengths = generator(seed, "turns").geometric(1 / self.turns, count)
        num_sessions = int(np.searchsorted(np.cumsum(lengths), count)) + 1
        lengths = lengths[:num_sessions]
        session = np.repeat(np.arange(num_sessions), lengths)[:count]
        turn = (np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths))[:count]
        shares = np.arange(1, self.num_systems + 1) ** -float(self.zipf)
        user = read_lengths("user", self.user)(generator(seed, "user"), count)
        output = read_lengths("output", self.output)(generator(seed, "output"), count)
        limit = min((n for n in (self.max_output, self.max_tokens) if n is not None), default=None)
        return _Turns(
            session,
            turn,
            user,
            output if limit is None else np.minimum(output, limit),
            system=generator(seed, "systems").choice(self.num_systems, num_sessions, p=shares / shares.sum()),
            system_tokens=read_lengths("system", self.system)(generator(seed, "system"), self.num_systems),
        )

    def _items(self, drawn: _Turns, vocab_size: int) -> list[WorkItem]:
        numbers = np.unique(drawn.session)
        rate = None if self.rate is None else self.rate * len(numbers) / len(drawn.session)
        starts = dict(zip(numbers.tolist(), arrivals(self.seed, len(numbers), rate, self.cv).tolist(), strict=True))
        thinks = np.where(
            drawn.turn > 0, generator(self.seed, "think").exponential(1.0, len(drawn.turn)) * self.think_s, 0.0
        )
        waits = np.array([starts[s] for s in drawn.session.tolist()]) + _within(drawn, thinks)
        # In the order of arrival if answers took no time.
        order = np.lexsort((drawn.turn, drawn.session, waits))
        texts, prompts, clients = self.seed_of_texts, drawn.prompts(), self.client_names(int(numbers[-1]) + 1)
        items: list[WorkItem] = []
        last: dict[int, int] = {}
        for index, place in enumerate(order.tolist()):
            session, system = int(drawn.session[place]), int(drawn.system[drawn.session[place]])
            head, prompt = int(drawn.system_tokens[system]), int(prompts[place])
            output, max_tokens = asked_for(int(drawn.output[place]), self.max_tokens, self.oracle)
            after = last.get(session)
            items.append(
                WorkItem(
                    index,
                    starts[session] if after is None else float("nan"),
                    prompt,
                    output,
                    max_tokens,
                    functools.partial(_prompt, texts, system, head, session, prompt - head, vocab_size),
                    functools.partial(stream, _session_key(texts, session), prompt - head, output, vocab_size),
                    clients[session],
                    session,
                    after,
                    float(thinks[place]),
                )
            )
            last[session] = index
        return items


@dataclasses.dataclass(frozen=True)
class _Turns:
    """Turns by session, [N] each: session, number of the turn, tokens added by the user, tokens of the answer.

    system: [sessions] number of its system prompt. system_tokens: [num_systems].
    """

    session: np.ndarray
    turn: np.ndarray
    user: np.ndarray
    output: np.ndarray
    system: np.ndarray
    system_tokens: np.ndarray

    def prompts(self) -> np.ndarray:
        """Returns the tokens of each prompt, [N]."""
        own = _within(self, self.user + self.output) - self.output
        return self.system_tokens[self.system[self.session]] + own

    def with_systems(self, tokens: np.ndarray) -> _Turns:
        return dataclasses.replace(self, system_tokens=tokens)

    def keep(self, kept: np.ndarray) -> _Turns:
        fields = {name: getattr(self, name)[kept] for name in ("session", "turn", "user", "output")}
        return dataclasses.replace(self, **fields)

    def hit_rate(self) -> float:
        """Returns the fraction of prompt tokens that came before, counted in tokens rather than blocks."""
        prompts = self.prompts()
        first = self.turn == 0
        new = int(self.user.sum()) + int(self.system_tokens[np.unique(self.system[self.session[first]])].sum())
        return 1 - new / int(prompts.sum())


def _within(drawn: _Turns, values: np.ndarray) -> np.ndarray:
    """Returns running sums within each session, whose turns are in a row."""
    total = np.cumsum(values)
    before = (total - values)[drawn.turn == 0]
    return total - np.repeat(before, np.diff(np.append(np.flatnonzero(drawn.turn == 0), len(values))))


def _solved(drawn: _Turns, target: float) -> np.ndarray:
    """Returns the lengths of system prompts, all scaled by one factor, that give a hit rate."""

    def scaled(factor: float) -> np.ndarray:
        return np.maximum(np.rint(drawn.system_tokens * factor).astype(np.int64), 1)

    low, high = 0.0, 2.0**20
    least, most = (drawn.with_systems(scaled(factor)).hit_rate() for factor in (low, high))
    if not least <= target <= most:
        raise ConfigError(
            f"Sessions: hit_rate is {target:g}, the {len(drawn.turn):,} turns drawn give {least:.3f} to {most:.3f}, "
            "depending on the length of system prompts: change turns, user or output"
        )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if drawn.with_systems(scaled(middle)).hit_rate() < target else (low, middle)
    return scaled(high)


def _session_key(seed: int, session: int) -> int:
    return key_of("session", seed, session)


def _prompt(seed: int, system: int, head: int, session: int, own: int, vocab_size: int) -> np.ndarray:
    beginning = stream(key_of("system", seed, system), 0, head, vocab_size)
    return np.concatenate([beginning, stream(_session_key(seed, session), 0, own, vocab_size)])
