"""Health of a server as the router sees it, and when a request is tried again. Pure state machines, no HTTP.

The caller probes, passes the result, and gives the weight to `Router.set_weight`; it removes a dead server
from the router, and adds it when it answers again.
"""

from __future__ import annotations

import dataclasses
import enum
import random

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError

# Statuses that another server may not return; None is a connection that could not be made, or broke.
RETRIED = (None, 429, 502, 503, 504)
RETRY_S = 0.05


class ServerState(enum.Enum):
    """READY takes requests. WARMING takes a growing share of them. DRAINING only finishes its own. DEAD has failed."""

    READY = "ready"
    WARMING = "warming"
    DRAINING = "draining"
    DEAD = "dead"


@dataclasses.dataclass(frozen=True)
class HealthSettings:
    """When a server counts as ready or dead.

    Args:
      probe_every_s: time between two probes. max_missed: probes in a row, with no part of an answer meanwhile, after
        which it is dead.
      warm_s: time for a recovered server's share to grow to the whole.

    Probes have the defaults of SGLang's router. It also has a circuit breaker, which counts failed requests;
    here only probes count, because a client can send requests that every server fails.
    """

    probe_every_s: float = 10.0
    max_missed: int = 3
    warm_s: float = 10.0

    def __post_init__(self) -> None:
        checks.require(
            checks.number("probe_every_s", self.probe_every_s, above=0),
            checks.integer("max_missed", self.max_missed),
            checks.number("warm_s", self.warm_s, 0),
            error=ConfigError,
        )


class Health:
    """State of one server; it is dead until a probe finds it ready.

    Args:
      cold: whether a server that is ready for the first time has to warm up.
    """

    def __init__(self, settings: HealthSettings | None = None, *, cold: bool = True):
        self.settings = settings or HealthSettings()
        self._state = ServerState.DEAD
        self._cold = cold
        self._warm_from, self._missed = 0.0, 0

    def state(self, now: float) -> ServerState:
        """Returns the state; a server that has warmed up is ready."""
        if self._state is ServerState.WARMING and now - self._warm_from >= self.settings.warm_s:
            self._state = ServerState.READY
        return self._state

    def weight(self, now: float) -> float:
        """Returns the probability with which the server may be chosen."""
        state = self.state(now)
        if state is ServerState.WARMING:  # not from 0: a server that gets nothing does not warm up
            return max(0.05, (now - self._warm_from) / self.settings.warm_s)
        return 1.0 if state is ServerState.READY else 0.0

    def probe(self, answer: bool | None, now: float) -> ServerState:
        """Takes the answer to a probe: True if it is ready, False if it answers and is not, None if it does not.

        Returns the state after it.
        """
        if answer is None:
            self._missed += 1
            if self._missed >= self.settings.max_missed:
                self.gone()
            return self._state
        self._missed = 0
        state = self.state(now)
        if not answer:
            self._state = ServerState.DEAD if state is ServerState.DEAD else ServerState.DRAINING
        elif state is ServerState.DEAD:
            self._state = ServerState.WARMING if self._cold and self.settings.warm_s else ServerState.READY
            self._warm_from, self._cold = now, True
        elif state is ServerState.DRAINING:
            self._state = ServerState.READY  # with its whole cache
        return self._state

    def sent(self) -> None:
        """Takes a part of an answer as a sign of life, as a server under load may be late for probes alone."""
        self._missed = 0

    def gone(self) -> None:
        """Marks the server as dead, for example after its process has ended."""
        self._state = ServerState.DEAD


def retry_wait_s(num_tries: int, status: int | None, max_retries: int, dice: random.Random) -> float | None:
    """Returns the seconds after which a failed request goes to the next best server; None if it has failed.

    The wait doubles with each try, and is longer by up to half at random, so that clients of a failed server do not
    return together.

    Args:
      num_tries: that have failed so far. status: of the last answer; None if there was none.
    """
    if num_tries > max_retries or status not in RETRIED:
        return None
    return RETRY_S * 2 ** (num_tries - 1) * (1 + dice.random() / 2)
