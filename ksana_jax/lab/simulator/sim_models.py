"""A simulated server of several models, of which one is awake: each client that has a name asks a model of its own.

All have the size of the engine's model. A change waits until the requests of the one that is awake have ended, drops
its prefixes, and takes some seconds, in which nothing else is computed. As in `engine.model_memory`, new requests wait
too once another model has waited for TURN_S.
"""

from __future__ import annotations

from typing import Any

from ksana_jax.engine.completion import Request
from ksana_jax.engine.model_memory import TURN_S
from ksana_jax.lab.simulator.one_engine import Served, SimEngine


class SimModels(SimEngine):
    """A server of a fleet.

    Args:
      switch_s: seconds from the end of one model's requests to the start of another's.
      given: as for `SimEngine`.

    Attributes:
      num_switches: changes so far; the first model is awake at the start.
    """

    def __init__(self, *given: Any, switch_s: float, **settings: Any):
        super().__init__(*given, **settings)
        self.num_switches, self._switch_s = 0, switch_s
        self._awake: str | None = None
        self._waiting: list[Served] = []

    def enter(self, served: Served, cache_salt: str = "") -> None:
        if self._awake is None:
            self._awake = served.item.client
        if served.item.client == self._awake and not self._turn_is_over():
            return super().enter(served, self._salt)
        self._waiting.append(served)
        if not self.open:
            self._switch()

    @property
    def _salt(self) -> str:
        """No prefix of an earlier turn is found again."""
        return f"{self._awake} {self.num_switches}"

    def _turn_is_over(self) -> bool:
        return bool(self._waiting) and self.events() - self._waiting[0].arrival_s >= TURN_S

    def _report(self, done: list[Request]) -> None:
        super()._report(done)
        if self._waiting and not self.open:
            self._switch()

    def _switch(self) -> None:
        """Wakes the model whose request has waited longest."""
        self._awake = self._waiting[0].item.client
        self.executor.occupy(self._switch_s)
        self.num_switches += 1
        ready = [served for served in self._waiting if served.item.client == self._awake]
        self._waiting = [served for served in self._waiting if served.item.client != self._awake]
        for served in ready:
            super().enter(served, self._salt)
