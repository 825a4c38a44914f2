"""Steps of one shape without drafts, as long as these do not pay. Knows no costs."""

from __future__ import annotations

import dataclasses

# Steps without drafts after drafts did not pay, doubled each time in turn up to the most; 1 at first where the proposer
# found none.
LEAST_REST, MOST_REST = 8, 256
# Most steps without drafts in turn before times of steps with drafts are forgotten; MOST_REST at first and after a
# long run of drafts.
LONGEST_MEMORY = 4096
# Steps with drafts after which a few have none, to see what these take by now; fewer where drafts gain less than this.
LONGEST_RUN, SHORT_RUN, LARGE_GAIN, PAUSE = 256, 32, 1.3, 5


@dataclasses.dataclass
class Rest:
    """Steps of one shape without drafts.

    left: until drafts are asked for again. last: how many there were last time; 0 since drafts have paid.
    trial: steps that are left of one, None before. run: steps with drafts since the last one without. longest: of runs.
    number: steps without drafts in turn. memory: of them, those after which times of steps with drafts are forgotten.
    drafts: whether drafts are asked for.
    """

    left: int = 0
    last: int = 0
    trial: int | None = None
    run: int = 0
    longest: int = SHORT_RUN
    number: int = 0
    memory: int = MOST_REST
    drafts: bool = False

    def begin(self, least: int) -> None:
        """Begins a rest twice as long as the last one."""
        self.left = self.last = min(max(2 * self.last, least), MOST_REST)
        self.run, self.trial, self.drafts = 0, None, False

    def step(self, count: int = 1) -> None:
        self.left, self.number = max(self.left - count, 0), self.number + count
