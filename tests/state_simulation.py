"""Random simulations of engines with recurrent layers. A slot holds a hash of the tokens before it, which is compared
with the text of each row that reads it."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.kv.leaf import Leaf
from ksana_jax.kv.moves import Moves
from ksana_jax.kv.state_layout import StateLayout
from ksana_jax.methods.state_snapshots.every import Every
from ksana_jax.methods.state_snapshots.forks import Forks
from ksana_jax.methods.state_snapshots.marconi import Marconi
from ksana_jax.methods.state_snapshots.prompt_end import PromptEnd
from ksana_jax.methods.state_snapshots.request_end import RequestEnd
from ksana_jax.scheduler.sequence import Sequence as Text
from ksana_jax.scheduler.step.per_token import states
from ksana_jax.scheduler.step.types import StepInput, StepOutput, fed
from tests.fakes import CheckedBuilder, FakeExecutor
from tests.simulation import Simulation
from tests.speculating_simulation import DraftModelSimulation, Speculating


def state_after(state: int, tokens: Sequence[int]) -> int:
    """Returns the state after more tokens: of a text's first ones after 0."""
    for token in tokens:
        state = (state * 0x100000001B3 + int(token) + 1) % 2**64
    return state


class StateExecutor(FakeExecutor):
    """A `FakeExecutor` with slots for states, of which `reads` records what each step has read."""

    def __init__(self, num_slots: int, num_host: int, *given, **settings):
        self.slots, self.host_states = np.zeros(num_slots, np.uint64), np.zeros((num_host, 1), np.uint64)
        self.texts: dict[int, list[tuple[Text, int]]] = {}
        self.reads: list[tuple[Text, int, int]] = []
        super().__init__(*given, **settings)

    def reset(self) -> None:
        super().reset()
        self.slots[:], self.host_states = self._noise(), np.full_like(self.host_states, self._noise())

    def submit(self, step: StepInput) -> StepOutput:
        tokens, output = fed(step.arrays.tokens, self._sampled, np), super().submit(step)
        (sources, targets, _, verified), (of, nth_of_row) = step.arrays.states
        if step.drafts is not None:  # the step itself writes no states
            assert (targets == FAR).all() and output.num_accepted is not None
            targets, of = (
                verified,
                np.where(nth_of_row <= output.num_accepted[np.minimum(of, len(output.num_accepted) - 1)], of, FAR),
            )
        before = [0 if slot == FAR else int(self.slots[slot]) for slot in sources.tolist()]
        for nth, (seq, count) in enumerate(texts := self.texts.pop(id(step))):
            if nth and sources[nth] == targets[nth - 1] != FAR:  # the text before it, up to a snapshot
                before[nth] = int(self.slots[sources[nth]])
            self.reads.append((seq, count, before[nth]))
            self.slots[targets[nth]] = state_after(before[nth], tokens[of == nth])
        assert sorted({*of.tolist()} - {FAR}) == [*range(len(texts))]
        return output

    def submit_together(self, steps: Sequence[StepInput]) -> list[StepOutput]:
        return [self.submit(step) for step in steps]

    def move(self, moves: Moves) -> None:
        super().move(moves)
        if (of_states := moves.states) is not None:
            self.host_states[of_states.saves[:, 1], 0] = self.slots[of_states.saves[:, 0]]
            assert not len(of_states.copies)
            self.slots[of_states.loads[:, 1]] = self.host_states[of_states.loads[:, 0], 0]


class StateBuilder(CheckedBuilder):
    """Tells the executor whose states a step reads, and checks that nobody else needs the slots that it writes."""

    engine = None

    def build(self, batch, rows):
        step, ends = super().build(batch, rows)
        pool, here = self.engine.memory.states.pool, batch.rows
        source, target, via = rows.state_from[here], rows.state_to[here], rows.state_via[here]
        target = np.append(target[source != target], via[via < FAR])
        assert (pool.ref_count[target] == 1).all() and not pool.kept[target].any(), "a slot is written that others own"
        assert not set(target.tolist()) & set(source.tolist()), "a slot is written and read"
        assert len({*target.tolist()}) == len(target), "two texts write a slot"
        texts = self.engine.executor.texts[id(step)] = []
        for row in here.tolist():
            begins = [rows.num_computed[row]] + ([rows.cache_at[row]] if rows.state_via[row] < FAR else [])
            texts += [(rows.seqs[row], int(count)) for count in begins]
        return step, ends


class StateSimulation(Simulation):
    """A `Simulation` of a model that has recurrent layers too."""

    def draw_storage(self) -> None:
        super().draw_storage()
        rng, rows = self.rng, self.settings["max_num_seqs"]
        self.policy = rng.choice([PromptEnd(), Every(blocks=1), Every(blocks=rng.randint(1, 4)), None])
        self.num_slots = rows * (1 + self.settings["caching"]) + rng.choice([0, 1, 2, 8, 60])
        # Without a draw of rng: seeds of planted bugs keep theirs.
        self.policy = random.Random(self.num_slots).choice([RequestEnd(), self.policy, Forks(), Marconi()])
        num_host = rng.choice([0, 1, 3, 30]) if self.settings["host_slots"] else 0
        self.settings["make_executor"] = functools.partial(StateExecutor, self.num_slots, num_host)
        self.settings["disk_states"] = self.disk  # keys of states are those of no block

    def drawn(self) -> set[str]:
        return super().drawn() | {"recurrent layers"}

    def start(self) -> None:
        super().start()
        scheduler = self.engine.scheduler
        layout = StateLayout((), (Leaf("state", (), "uint64"),), self.num_slots)
        scheduler.state_snapshots = self.policy
        scheduler.set_layout(dataclasses.replace(scheduler.layout, states=layout))
        builder = self.engine.builder
        settings = {field.name: getattr(builder, field.name) for field in dataclasses.fields(builder) if field.init}
        self.engine.builder = StateBuilder(**settings | {"additions": builder.additions | {"states": states}})
        self.engine.builder.engine = self.engine

    def step(self) -> None:
        super().step()
        executor, tier = self.engine.executor, self.engine.memory.states
        executor.reads = [read for read in executor.reads if not self._is_right(*read)]
        free = (tier.pool.ref_count == 0) & ~tier.pool.kept
        for saves in tier.moves.all_saves:
            free[list(saves.values())] = False
        executor.slots[free] = executor._noise()
        if tier.host is not None:
            executor.host_states[(tier.host.pool.ref_count == 0) & ~tier.host.pool.kept] = executor._noise()

    def _is_right(self, seq: Text, count: int, state: int) -> bool:
        """Checks a state that was read; False as long as not all tokens before it are known."""
        rows = self.engine.scheduler.rows
        text = seq.token_ids if seq.row is None else rows.token_ids[seq.row, : rows.num_known[seq.row]]
        if len(text) < count:
            return seq.finish_reason is not None
        assert state == state_after(0, text[:count]), f"a state of other tokens than the first {count}"
        self.seen["states read"] += count > 0
        return True

    def count(self, event: str) -> None:
        super().count(event)
        own = self.engine.memory.states.own_counters
        self.seen.update({f"states {name}": count for name, count in dataclasses.asdict(own).items()})

    def finish(self) -> None:
        super().finish()
        tier = self.engine.memory.states
        assert tier.pool.num_used == 0 and (tier.host is None or tier.host.pool.num_used == 0)
        assert not self.engine.executor.reads


class SpeculatingStateSimulation(StateSimulation, Speculating):
    """Drafts without branches: of rejected ones, no state has anything."""

    def draw_storage(self) -> None:
        super().draw_storage()
        self.settings["speculative_config"]["trees"] = False


class DraftModelStateSimulation(StateSimulation, DraftModelSimulation):
    """Drafts of a model without states."""
