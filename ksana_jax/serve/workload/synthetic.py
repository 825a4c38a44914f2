"""Single requests with drawn gaps and lengths, whose prompts share nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.workload.arrivals import arrivals, generator
from ksana_jax.serve.workload.base import Encode, WorkloadSettings
from ksana_jax.serve.workload.items import Workload
from ksana_jax.serve.workload.lengths import read_lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic(WorkloadSettings):
    """Requests with drawn gaps and lengths.

    Args:
      rate: requests per second; None sends all at once.
      cv: coefficient of variation of the gaps, which are gamma distributed: 0 constant, 1 Poisson, more bursts.
      prompt, output: lengths in tokens, see `lengths.read_lengths`.
    """

    num_requests: int = 1000  # pyright: ignore[reportIncompatibleVariableOverride]
    rate: float | None = 1.0
    cv: float = 1.0
    prompt: Any = 512
    output: Any = 128

    def check(self) -> None:
        checks.require(
            checks.integer("Synthetic: num_requests", self.num_requests),
            checks.number("Synthetic: rate", self.rate, above=0, optional=True),
            checks.number("Synthetic: cv", self.cv, 0, 100),
            error=ConfigError,
        )
        read_lengths("Synthetic: prompt", self.prompt)
        read_lengths("Synthetic: output", self.output)

    def _make(self, vocab_size: int, encode: Encode | None) -> Workload:
        count = self.num_requests
        prompts = read_lengths("prompt", self.prompt)(generator(self.seed, "prompt"), count)
        outputs = read_lengths("output", self.output)(generator(self.seed, "output"), count)
        prompts, outputs, notes = self.cut(prompts, outputs)
        times = arrivals(self.seed, count, self.rate, self.cv)
        items = self.singles(vocab_size, times, prompts, outputs)
        return Workload(self.label, self.seed, items, tuple(notes))
