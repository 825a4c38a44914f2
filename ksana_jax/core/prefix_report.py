"""Reports of what the prefix cache reused of a prompt, and why not more. Knows no cache."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

# By cause. "Known" tokens are those whose keys were found.
CAUSES = {
    "partial_block": "all full blocks before the last token",
    "disabled": "prompt_logprobs or kv_eviction allows no more",
    "never_seen": "no cached or recently evicted prompt continues the same way",
    "diverged": "differs from {which} at token {position:,}: {here!r} here, {there!r} there",
    "evicted": "the cache had {num_known:,} until {when}",
    "window": "{num_known:,} are known, but the cache has no more of layers with a window",
    "not_read": "{num_known:,} are known, and were not read from disk: too slow, or no free block on the host",
    "salt": "{num_known:,} are cached for requests with another cache_salt",
    "adapter": "{num_known:,} are cached for another adapter",
    "settings": "{num_known:,} are cached for another attention pattern or other weights",
}
_SENTENCE = re.compile(rf"({'|'.join(CAUSES)}): reused ([\d,]+) of ([\d,]+) tokens(?: \([^)]*\))?: (.+)")


@dataclasses.dataclass(frozen=True)
class PrefixReport:
    """What the prefix cache reused of a request's prompt, and why not more.

    cause: a key of CAUSES. It explains the first token that was computed although it came before the last.
    num_tokens: of the prompt. num_cached: its first ones, which were reused; num_by_tier: by tier, {"device": 64, ...};
      under a window only those that are still attended to.
    num_known: its first tokens whose keys were found, at least num_cached.
    position: first token that differs from the nearest cached prompt; None unless the cause is "diverged".
    here_ids, there_ids: tokens around it, in this prompt and in the other; here, there: their texts. is_cached: False
      if the other prompt's block was evicted.
    evicted_s: seconds since the first missing block was evicted, None if that is not known. evicted_for: request that
      needed its place; empty if none did.
    """

    cause: str
    num_tokens: int
    num_cached: int
    num_known: int = 0
    num_by_tier: dict[str, int] = dataclasses.field(default_factory=dict)
    position: int | None = None
    here_ids: Sequence[int] = ()
    there_ids: Sequence[int] = ()
    here: str = ""
    there: str = ""
    is_cached: bool = True
    evicted_s: float | None = None
    evicted_for: str = ""

    def with_texts(self, decode: Callable[[Sequence[int]], str]) -> PrefixReport:
        """Returns the report with `here` and `there`."""
        if self.position is None:
            return self
        return dataclasses.replace(self, here=decode(self.here_ids), there=decode(self.there_ids))

    def __str__(self) -> str:
        """The report as a sentence, such as "diverged: reused 0 of 412 tokens: differs from a cached prompt at ..."."""
        others = {name: number for name, number in self.num_by_tier.items() if number and name != "device"}
        tiers = f" ({', '.join(f'{number:,} from {name}' for name, number in others.items())})" if others else ""
        which = "a cached prompt" if self.is_cached else "a recently evicted prompt"
        why = f"{self.evicted_for} needed the blocks" if self.evicted_for else "they were dropped"
        when = f"{why} " + ("earlier" if self.evicted_s is None else f"{self.evicted_s:,.1f} s ago")
        here, there = self.here or [*self.here_ids], self.there or [*self.there_ids]
        values = vars(self) | {"which": which, "when": when, "here": here, "there": there}
        reused = f"{self.cause}: reused {self.num_cached:,} of {self.num_tokens:,} tokens{tiers}"
        return f"{reused}: {CAUSES[self.cause].format(**values)}"


def read_sentence(line: str) -> tuple[str, int, int, str] | None:
    """Returns cause, num_cached, num_tokens and reason of a line that ends in `str(report)`; None for other lines."""
    if (found := _SENTENCE.search(line)) is None:
        return None
    cause, cached, tokens, reason = found.groups()
    return cause, int(cached.replace(",", "")), int(tokens.replace(",", "")), reason
