"""The router's view of a request. It never knows how long the answer will be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

# Bytes of `hashes_of`, or numbers, as a trace has them.
Hash = bytes | int


@dataclasses.dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request that needs a server.

    Args:
      request_id: unique among unfinished requests.
      num_prompt: tokens of the rendered prompt.
      hashes: one for each full block of the prompt, of all tokens up to its end; see `hashes_of`.
      max_tokens: requested by the client.
      client: its sender, for fairness.
    """

    request_id: str
    num_prompt: int
    hashes: Sequence[Hash] = ()
    max_tokens: int = 16
    client: str = ""
