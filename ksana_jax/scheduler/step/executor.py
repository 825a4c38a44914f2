"""The interface between host and device: an executor, which computes steps. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np

from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.kv.moves import Moves
from ksana_jax.scheduler.step.types import StepInput, StepOutput


class Pending(Protocol):
    """A submitted step: its `StepOutput`, or what wraps it."""

    def result(self) -> StepOutput:
        """Waits for the step and returns its output. Call it once per step, in the order of submission."""
        ...


class Executor(Protocol):
    """Runs steps: the compiled model, a simulator, or a test's fake. After an exception only `reset` may be called."""

    @property
    def patterns(self) -> Seq[AttentionPattern]:
        """The attention pattern of each layer."""
        ...

    @property
    def host_blocks(self) -> np.ndarray | None:
        """The host's blocks [slots, ...], to which slots in `Moves` refer; None without a host tier."""
        ...

    @property
    def host_states(self) -> np.ndarray | None:
        """The same for states of recurrent layers [slots, ...], to which `Moves.states` refer."""
        ...

    def submit(self, step: StepInput) -> Pending:
        """Starts the step's moves and then its computation; may return before either is done.

        The next step may be submitted before this one's result is asked for.
        """
        ...

    def submit_together(self, steps: Seq[StepInput]) -> Seq[Pending]:
        """Starts num_scheduler_steps steps that `share_a_call`, each as `submit` would, in one call.

        None has penalties or biases, and executors with the embedding on the host are given none.
        """
        ...

    def move(self, moves: Moves) -> None:
        """Makes moves outside a step."""
        ...

    def set_patterns(self, patterns: Seq[AttentionPattern]) -> None:
        """Changes the attention pattern of each layer.

        Raises:
          ValueError: the executor cannot serve these patterns; nothing is changed.
        """
        ...

    def reset(self) -> None:
        """Reallocates the pool, which a failed step may have consumed, and the host's blocks, because running disk
        reads still write to the old ones."""
        ...


def share_a_call(steps: Seq[StepInput]) -> bool:
    """True if one call can compute steps of decodes in sequence: they have one shape and request the same numbers,
    and no blocks move between them."""

    def kind(step: StepInput) -> tuple[Any, ...]:
        return step.shape, step.num_sampled, step.num_logprobs, step.sampling is None, step.targets is None

    first, *others = steps
    alike = all(step.moves is None and kind(step) == kind(first) for step in others)
    return alike and first.drafts is None and first.targets is None and not any(step.pools for step in steps)
