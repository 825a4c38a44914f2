"""The interface of policies that decide where in a text the states of recurrent layers are cached."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotPolicy(abc.ABC):
    """Decides where in a text the states of recurrent layers are cached; its fields are its settings.

    A prompt continues at the last snapshot among its cached blocks: keys and values without a state are of no use.

    num_slots: of the pool of states, one for each running row, snapshot and fork; None takes 2 * max_num_seqs, and
      3 * max_num_seqs with a prefix cache. With fewer, completions and beams of one prompt may compute it again.

    Attributes:
      at_forks: whether the state is cached, besides, after those blocks of a prompt whose keys and values were cached.
      last_only: whether of the snapshots from the end of a prompt on, the last alone is cached, when the request ends.
    """

    at_forks: ClassVar[bool] = False
    last_only: ClassVar[bool] = False
    num_slots: int | None = None

    def __post_init__(self):
        checks.require(checks.integer("state_snapshots num_slots", self.num_slots, optional=True), error=ConfigError)

    @abc.abstractmethod
    def next_block(self, num_blocks: int, num_prompt: int) -> int | None:
        """Returns after how many blocks of a text the next snapshot is taken, or None for no more.

        A step of the prompt ends there, so each snapshot inside a prompt may cost a step.

        Args:
          num_blocks: full blocks of the text that are computed; the result is larger. num_prompt: full blocks of the
            prompt before its last token.
        """
