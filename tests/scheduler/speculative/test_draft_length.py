"""Drafts are as long as pays, on machines whose step times a test sets."""

import dataclasses
import statistics
from collections.abc import Callable

import numpy as np
import pytest

from ksana_jax.core.config import EngineConfig
from ksana_jax.scheduler.speculative import draft_lengths
from ksana_jax.scheduler.speculative.draft_length import BLOCK, PROBE_SHARE, Goodput
from ksana_jax.scheduler.step.ladders import make_buckets
from ksana_jax.scheduler.step.types import TileGroup

CONFIG = {"method": "ngram", "num_speculative_tokens": 7}


@dataclasses.dataclass
class Machine:
    """Runs steps of `rows` rows on a simulated clock.

    Args:
      device_s: seconds of a step by its padded tokens. acceptance: of a draft token; of each row, if they differ.
      found: share of the steps with drafts among the ones that ask for drafts.
      host_s: of a step, at the same time as the device's only if it runs ahead, so not after one that asks for them.
      asked_s: of the proposer, whenever it is asked. cold_s: of the first step with drafts after another one.
      noise: maximum extra time of a step, as a share. pauses: share of the steps that take 50 times as long.
      most: draft tokens of a row.
    """

    device_s: Callable[[int], float]
    rows: int
    acceptance: float | np.ndarray
    found: float = 1.0
    host_s: float = 2e-4
    asked_s: float = 0.0
    cold_s: float = 0.0
    noise: float = 0.2
    pauses: float = 0.0
    most: int = 7
    seed: int = 0

    def __post_init__(self):
        config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=512, speculative_config=CONFIG)
        self.buckets = make_buckets(config, "test", draft_lengths(config))
        self.goodput, self.rng, self.last = Goodput(self.buckets), np.random.default_rng(self.seed), 0
        self.lengths: list[int] = []

    def step(self, length: int) -> tuple[float, np.ndarray]:
        """Returns seconds of a step that asks for drafts of `length` tokens, and accepted tokens of each row."""
        drafted = length if self.rng.random() < self.found else 0
        part = TileGroup(self.buckets.num_sampled(self.rows), 1)
        if drafted:
            part = next(p for p in self.buckets.verifications if p.count >= self.rows and p.width > drafted)
        device_s = self.device_s(part.count * part.width)
        seconds = device_s + self.host_s + self.asked_s if length or self.last else max(device_s, self.host_s)
        seconds += (length != self.last and length > 0) * self.cold_s
        seconds *= 1 + self.noise * self.rng.random() + 49 * (self.rng.random() < self.pauses)
        self.last = length
        right = self.rng.random((self.rows, drafted)) < np.broadcast_to(self.acceptance, self.rows)[:, None]
        return seconds, right.cumprod(axis=1).sum(axis=1)

    def speed(self, steps: int, length: int | None = None) -> float:
        """Returns tokens of a row per second with drafts of `length` tokens; None lets goodput choose."""
        total_s = tokens = 0.0
        for _ in range(steps):
            chosen = self.goodput.choose(self.rows, self.most) if length is None else length
            self.lengths.append(chosen)
            step_s, new = self.step(chosen)
            if length is None:
                self.goodput.observe(self.rows, chosen, step_s, (np.arange(self.rows), new))
            total_s, tokens = total_s + step_s, tokens + 1 + new.mean()
        return tokens / total_s


def linear(tokens: int) -> float:
    """A machine that is busy with a single token."""
    return 1e-3 * tokens


def knee(tokens: int) -> float:
    """A machine with room for 64 tokens in the time of one."""
    return 1e-3 * max(tokens, 64) / 64


def slope(tokens: int) -> float:
    """A machine that is half busy with 32 tokens."""
    return 1e-3 * (1 + tokens / 32)


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("acceptance", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("device_s", [linear, knee, slope])
def test_it_is_nearly_as_fast_as_the_best_fixed_length(rows, acceptance, device_s):
    """The median of machines: how soon a run of luck ends, or begins, differs between them."""

    def machine(seed=0):
        return Machine(device_s, rows, acceptance, seed=seed)

    best = max(machine().speed(800, length) for length in (0, 4, 7))
    speeds = []
    for seed in range(5):
        chooses = machine(seed)
        chooses.speed(400)
        speeds.append(chooses.speed(1500))
    assert statistics.median(speeds) > 0.95 * best


@pytest.mark.parametrize("device_s, cold_s", [(linear, 0.0), (slope, 0.0), (slope, 2e-2)])
def test_probes_of_drafts_that_lose_take_their_share_of_the_time(device_s, cold_s):
    plain, chooses = Machine(device_s, 8, 0.0).speed(800, 0), Machine(device_s, 8, 0.0, cold_s=cold_s)
    first = chooses.speed(300)
    assert cold_s or 0.9 * plain < first, "the first ones, whose cost is not known before"
    assert chooses.speed(20_000) > (1 - 1.5 * PROBE_SHARE) * plain
    assert {0, 4, 7} == set(chooses.lengths[300:]), "a length is not tried again"
    assert np.count_nonzero(chooses.lengths) % (BLOCK + 1) == 0, "a probe is one block, and the step that enters it"


def test_drafts_come_back_when_texts_become_predictable_and_stop_when_they_are_no_longer():
    machine = Machine(slope, 4, 0.0)
    machine.speed(2000)
    machine.acceptance = 0.95
    machine.speed(2000)
    assert statistics.mean(machine.lengths[-500:]) > 6
    machine.acceptance = 0.0
    machine.speed(200)
    machine.lengths.clear()
    machine.speed(1000)
    assert np.count_nonzero(machine.lengths) < 40


def test_drafts_stop_when_the_machine_becomes_slower_with_them():
    machine = Machine(knee, 4, 0.5)
    machine.speed(1000)
    assert statistics.mean(machine.lengths[-500:]) > 3
    machine.device_s = linear
    machine.speed(200)
    machine.lengths.clear()
    machine.speed(1000)
    assert np.count_nonzero(machine.lengths) < 40


@pytest.mark.parametrize("acceptance", [0.0, 0.9])
def test_pauses_of_the_machine_change_no_choice_for_long(acceptance):
    """A step in 200 takes 50 times as long: a fifth of the time, whatever is chosen."""
    machine = Machine(slope, 4, acceptance, pauses=0.005)
    machine.speed(500)
    machine.lengths.clear()
    machine.speed(3000)
    drafts = np.count_nonzero(machine.lengths) / 3000
    assert drafts < 0.1 if acceptance == 0 else drafts > 0.8


@pytest.mark.parametrize("found", [0.02, 0.3])
def test_a_length_is_worth_what_it_yields_drafts_that_are_not_found_included(found):
    plain, fixed = (Machine(slope, 8, 0.9, found=found).speed(3000, length) for length in (0, 7))
    machine = Machine(slope, 8, 0.9, found=found)
    machine.speed(500)
    assert machine.speed(3000) > 0.93 * max(plain, fixed)


@pytest.mark.parametrize("asked_s, drafts", [(0.0, True), (5e-3, False)])
def test_the_time_of_the_proposer_counts(asked_s, drafts):
    machine = Machine(slope, 8, 0.8, asked_s=asked_s)
    machine.speed(1000)
    assert (statistics.mean(machine.lengths[-500:]) > 2) == drafts


def test_numbers_of_rows_are_judged_apart():
    machine = Machine(slope, 1, 0.6)
    for _ in range(40):
        for machine.rows in (1, 64):
            machine.speed(50)
    assert statistics.mean(machine.lengths[-100:-50]) > 2
    assert np.count_nonzero(machine.lengths[-50:]) < 25


def test_no_step_drafts_more_than_it_may():
    machine = Machine(knee, 4, 0.95)
    machine.speed(500)
    assert max(machine.lengths) == 7
    machine.most = 4
    machine.lengths.clear()
    machine.speed(500)
    assert max(machine.lengths) == 4 and statistics.mean(machine.lengths[-200:]) > 3


def test_one_long_pause_changes_no_choice_for_long():
    machine = Machine(slope, 4, 0.9)
    machine.speed(1000)
    machine.goodput.observe(4, machine.goodput.choose(4, 7), 1.0, (np.arange(4), np.full(4, 7)))
    machine.lengths.clear()
    machine.speed(300)
    assert statistics.mean(length == 7 for length in machine.lengths) > 0.8


def small(steps_per_call: int = 1, max_num_seqs: int = 4) -> Goodput:
    config = EngineConfig(max_num_seqs=max_num_seqs, max_model_len=512, speculative_config=CONFIG)
    return Goodput(make_buckets(config, "test", draft_lengths(config)), steps_per_call)


@pytest.mark.parametrize("step_s, drafts", [(3e-3, False), (1e-3, True)])
@pytest.mark.parametrize("steps", [4, 8])
def test_steps_that_share_a_call_take_their_share_of_its_time(steps, step_s, drafts):
    """The first step of a call seems to take all of its time."""
    goodput, lengths = small(steps), []
    for step in range(4000):
        lengths.append(goodput.choose(4, 7))
        if lengths[-1]:
            goodput.observe(4, lengths[-1], step_s, (np.arange(4), np.ones(4)))
        else:
            goodput.observe(4, 0, 0.0 if step % steps else 1e-3 * steps)
    assert (np.count_nonzero(lengths) > 3000) == drafts


def test_a_step_after_one_of_another_kind_is_not_measured():
    goodput = small()
    for _ in range(100):
        assert goodput.choose(4, 7) == 0
        goodput.observe(4, 0, 1e-3)
        goodput.interrupt()


def test_steps_that_were_submitted_before_the_choice_do_not_count_for_it():
    goodput = small()
    while not (chosen := goodput.choose(4, 7)):
        goodput.observe(4, 0, 1e-3)
    for _ in range(3 * BLOCK):
        goodput.observe(4, 0, 1e-3)
        assert goodput.choose(4, 7) == chosen


def test_drafts_that_help_few_rows_do_not_hold_up_the_others():
    """Half of the rows have seven tokens accepted, which makes 4.5 tokens of a step that takes twice as long; but the
    others then take twice as long, too."""
    rows, seconds = np.arange(8), {0: 1e-3, 4: 2e-3, 7: 2e-3}
    for accepted, drafts in ((np.array([1, 0] * 4), False), (np.full(8, 1), True)):
        goodput, lengths = small(max_num_seqs=8), []
        for _ in range(2000):
            lengths.append(length := goodput.choose(8, 7))
            goodput.observe(8, length, seconds[length], (rows, length * accepted) if length else None)
        assert (np.count_nonzero(lengths) > 1500) == drafts
