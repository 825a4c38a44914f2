"""Lives of engines that speculate, see `tests.simulation`: with right and with wrong guesses texts stay the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from ksana_jax.kv.eviction import read_eviction
from tests.expected import PATTERNS, STOP_IDS
from tests.fakes import FakeExecutor
from tests.guessing import ANSWERS, GUESSES
from tests.selecting_simulation import SelectingSimulation
from tests.simulated_requests import Expected
from tests.simulation import Simulation
from tests.storing_simulation import StoringSimulation, plain


class Speculating(Simulation):
    """Gives each engine a proposer."""

    def draw_storage(self) -> None:
        super().draw_storage()
        rng, most = self.rng, self.settings["max_num_batched_tokens"]
        if most < 2:
            self.settings["max_num_batched_tokens"] = most = 2
        if trees := rng.random() < 0.5:
            self.settings["max_num_batched_tokens"] = most = max(most, rng.randint(16, 40))
        most_drafts = rng.randint(1, min(most - 1, 9))
        self.guesses = rng.choice(GUESSES)
        self.settings["speculative_config"] = config = {
            "method": "tests.guessing:Guessing",
            "num_speculative_tokens": most_drafts,
            "guesses": self.guesses,
            "stop_ids": tuple(STOP_IDS),
            "seed": rng.randint(0, 999),
            "trees": trees,
            "adaptive": rng.choice(["off", "off", "goodput"]),
        }
        if rng.random() < 0.3:
            config["num_speculative_tokens_per_batch_size"] = [
                [2, 2, 0],
                [3, 4, most_drafts // 2],
            ]

    def drawn(self) -> set[str]:
        return super().drawn() | {"branches" if self.settings["speculative_config"]["trees"] else "drafts"}

    def start(self) -> None:
        ANSWERS.clear()
        super().start()
        self.seen[f"guesses {self.guesses}"] += 1

    def expect(self, request, max_len: int, salt: str) -> Expected:
        expected = super().expect(request, max_len, salt)
        if expected.logprobs is None:
            ANSWERS.setdefault(request.prompt_token_ids.astype(np.int32).tobytes(), []).extend(expected.tokens)
        return expected

    def check_step(self) -> None:
        super().check_step()
        speculation = self.engine.scheduler.speculation
        assert speculation is not None
        counts = speculation.counts
        executor = self.engine.executor
        assert isinstance(executor, FakeExecutor)
        self.seen["steps with trees"] += bool(executor.steps) and executor.steps[-1].shape.tree
        self.seen["accepted"] += counts.num_accepted_tokens
        self.seen["rejected"] += counts.num_draft_tokens - counts.num_accepted_tokens
        self.seen["failures of the proposer"] += counts.num_failures
        if self.guesses in ("nothing", "nonsense"):
            assert not counts.num_drafts
        assert not counts.num_failures or self.guesses in ("raises", "nonsense")
        rows, running = self.engine.scheduler.rows, self.engine.scheduler.order
        decodes = running[rows.num_known[running] > rows.num_prompt[running]]
        if not self.engine.num_steps_under_way:
            left = (rows.num_tokens - rows.num_computed)[decodes[~rows.is_beam[decodes]]]
            assert (left >= 1).all(), "a rejected token counts as computed"


class SpeculatingSimulation(Speculating):
    """An engine without evictions and codecs."""


class DraftModelSimulation(Simulation):
    """An engine whose draft model is the target itself, with blocks of its own pool under the same ids."""

    def draw_storage(self) -> None:
        super().draw_storage()
        most = self.settings["max_num_batched_tokens"] = max(self.settings["max_num_batched_tokens"], 2)
        most_drafts = self.rng.randint(1, min(most - 1, 9))
        self.settings["speculative_config"] = config = {
            "method": "tests.drafting_double:FakeDraftModel",
            "num_speculative_tokens": most_drafts,
        }
        if self.rng.random() < 0.3:
            config["num_speculative_tokens_per_batch_size"] = [[2, 2, 0], [3, 4, -(-most_drafts // 2)]]

    def drawn(self) -> set[str]:
        return super().drawn() | {"draft model"}

    def start(self) -> None:
        super().start()
        self._drafted = self._accepted = 0

    def check_step(self) -> None:
        super().check_step()
        speculation = self.engine.scheduler.speculation
        assert speculation is not None
        counts, alike = speculation.counts, len(set(PATTERNS[self.pattern])) == 1
        assert not counts.num_failures
        kind = "as far as all layers" if alike else "farther than some layers"
        self.seen[f"drafts that see {kind}"] += counts.num_draft_tokens - self._drafted
        self.seen[f"accepted drafts that see {kind}"] += counts.num_accepted_tokens - self._accepted
        self._drafted, self._accepted = counts.num_draft_tokens, counts.num_accepted_tokens


class SpeculatingStoringSimulation(Speculating, StoringSimulation):
    """An engine that stores codes, or evicts tokens by a method that does not observe attention."""

    def draw_eviction(self) -> tuple[tuple[str, Any], ...]:
        while True:
            found = super().draw_eviction()
            method = read_eviction(plain(found))
            if method is not None and not method.adds_up:
                return found


class SpeculatingSelectingSimulation(Speculating, SelectingSimulation):
    """Drafts without branches, and queries that select blocks."""

    def draw_storage(self) -> None:
        super().draw_storage()
        self.settings["speculative_config"]["trees"] = False


class DraftModelStoringSimulation(DraftModelSimulation, StoringSimulation):
    """An engine that stores codes, and whose draft model does not: it drafts what exact keys and values say."""

    def draws_eviction(self) -> bool:
        return False


class DraftModelSelectingSimulation(DraftModelSimulation, SelectingSimulation):
    """An engine whose queries select blocks, and whose draft model reads all of its own."""
