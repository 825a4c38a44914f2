"""Snapshots where texts part and at the end of requests, as Marconi admits them (arXiv:2411.19379, section 4.1)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ksana_jax.methods.state_snapshots.request_end import RequestEnd


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marconi(RequestEnd):
    """Caches the states of `Forks` and of `RequestEnd`: beginnings of prompts that many share, and chats.

    The paper weighs, of equal bytes, what replaced states take to compute again (section 4.2); here, that is
    `prefix_replacement` "cost_aware".
    """

    at_forks: ClassVar[bool] = True
