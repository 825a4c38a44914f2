"""Drafts are as long as pays, on machines of which a test says how long each step takes."""

import dataclasses

import numpy as np
import pytest

from ksana_jax.config import EngineConfig
from ksana_jax.speculative import draft_lengths
from ksana_jax.speculative.goodput import Goodput
from ksana_jax.step.buckets import Buckets
from ksana_jax.step.contract import Part

CONFIG = {"method": "ngram", "num_speculative_tokens": 7}


@dataclasses.dataclass
class Machine:
    """Runs steps of `rows` rows for some time.

    Args:
      seconds: of a step of so many padded tokens. acceptance: of a draft token, by row.
    """

    seconds: object
    rows: int
    acceptance: np.ndarray
    noise: float = 0.0

    def __post_init__(self):
        config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=512, speculative_config=CONFIG)
        self.buckets = Buckets.of(config, "test", draft_lengths(config))
        self.rng = np.random.default_rng(0)
        self.goodput = Goodput(self.buckets, 64)
        self.widths = sorted({part.width for part in self.buckets.verifications})
        for row in range(self.rows):
            self.goodput.begin(row)

    def part(self, width: int) -> Part:
        counts = (
            self.buckets.decodes if width == 1 else [p.count for p in self.buckets.verifications if p.width == width]
        )
        return Part(min(count for count in counts if count >= self.rows), width)

    def time(self, width: int) -> float:
        part = self.part(width)
        return self.seconds(part.count * part.width) * (1 + self.noise * self.rng.random())

    def step(self, k: int, most: int) -> tuple[float, int]:
        """Returns the seconds of a step with up to k of `most` draft tokens, and its tokens."""
        rows, width = np.arange(self.rows), next(w for w in (1, *self.widths) if w > k)
        seconds = self.time(width)
        self.goodput.observe_step(self.part(width), seconds)
        if not k:
            return seconds, self.rows
        accepted = (self.rng.random((self.rows, k)) < self.acceptance[:, None]).cumprod(axis=1).sum(axis=1)
        self.goodput.observe_drafts(rows, np.full(self.rows, min(k, most)), accepted)
        return seconds, self.rows + int(accepted.sum())

    def speed(self, steps: int, k: int | None = None, most: int = 7) -> float:
        """Returns tokens a second with k draft tokens; None lets goodput choose."""
        total_s, tokens = 0.0, 0
        for _ in range(steps):
            chosen = k
            if chosen is None:
                rests = self.goodput.rests(self.rows)
                chosen = 0 if rests else self.goodput.choose(np.arange(self.rows), np.full(self.rows, most))
            seconds, new = self.step(chosen, most)
            total_s, tokens = total_s + seconds, tokens + new
        return tokens / total_s


def linear(tokens: int) -> float:
    """A machine that is busy with a single token."""
    return 1e-3 * tokens


def knee(tokens: int) -> float:
    """A machine with room for 64 tokens in the time of one."""
    return 1e-3 * max(tokens, 64) / 64


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("acceptance", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("seconds", [linear, knee])
def test_it_is_as_fast_as_the_best_fixed_length_and_never_much_slower_than_none(rows, acceptance, seconds):
    def machine():
        return Machine(seconds, rows, np.full(rows, acceptance), noise=0.2)

    fixed = {k: machine().speed(300, k) for k in (0, *(width - 1 for width in machine().widths))}
    chooses = machine()
    chooses.speed(100)  # until all shapes are measured
    speed = chooses.speed(1000)
    assert speed > 0.97 * fixed[0]
    # A trial of drafts that do not pay costs most where rests are short and steps are eight times as long.
    assert speed > 0.93 * max(fixed.values())


def test_without_gains_drafts_are_tried_ever_more_rarely():
    machine = Machine(linear, 8, np.zeros(8))
    chosen = []
    for _ in range(2000):
        rests = machine.goodput.rests(8)
        chosen.append(0 if rests else machine.goodput.choose(np.arange(8), np.full(8, 7)))
        machine.step(chosen[-1], 7)
    tries = np.flatnonzero(chosen)
    assert len(tries) < 25 and (np.diff(tries[-4:]) >= 256).all()


def test_when_texts_become_predictable_drafts_come_back():
    machine = Machine(knee, 4, np.zeros(4))
    machine.speed(1000)
    machine.acceptance[:] = 0.95
    machine.speed(1500)
    assert machine.speed(300) > 4 * 4 / knee(4)


def test_a_row_without_drafts_does_not_count():
    machine = Machine(knee, 2, np.array([0.9, 0.0]))
    machine.speed(200)
    acceptance = machine.goodput.acceptance(np.arange(2))
    assert acceptance[0] > 0.8 and acceptance[1] < 0.1
    machine.goodput.begin(1)
    assert acceptance[1] < machine.goodput.acceptance(np.array([1]))[0] < acceptance[0]
