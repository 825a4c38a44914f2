"""Reports how much of a prompt the prefix cache reused, and why it reused no more."""

from __future__ import annotations

import dataclasses
import re

# Sentences by cause. A token is known if its block's key was found.
CAUSES = {
    "partial_block": "no more full blocks before the last token",
    "disabled": "prompt_logprobs or kv_eviction allows no more",
    "never_seen": "no cached or recently evicted prompt continues the same way",
    "diverged": "differs from an earlier prompt at token {position:,}: {here!r} here, {there!r} there",
    "evicted": "the cache had {num_known:,} until {evicted_for} {when}",
    "window": "{num_known:,} are known, but the cache has no more of layers with a window",
    "state": "keys and values of {num_known:,} are cached, and a state of the recurrent layers after {num_states:,}",
    "not_read": "{num_known:,} are known, and were not read from disk: too slow, or no free block on the host",
    "salt": "{num_known:,} are cached for requests with another cache_salt",
    "adapter": "{num_known:,} are cached for another adapter",
    "steering": "{num_known:,} are cached for another steering",
    "settings": "{num_known:,} are cached for another attention pattern or other weights",
}
_SENTENCE = re.compile(rf"({'|'.join(CAUSES)}): reused ([\d,]+) of ([\d,]+) tokens(?: \([^)]*\))?: (.+)")


@dataclasses.dataclass(frozen=True)
class PrefixReport:
    """Reports what the prefix cache reused of a request's prompt, and why no more.

    cause: a key of CAUSES. num_tokens: of the prompt; num_cached of them were reused, and num_known are known.
    num_by_tier: reused ones that later tokens attend to, {"device": 64, "host": 16}.
    position: the first token that differs from the nearest earlier prompt, if the cause is "diverged". here, there:
      both texts around it; lists of ids without a tokenizer.
    num_states: tokens after which the last cached state of recurrent layers is, if the cause is "state".
    evicted_s: seconds since the first missing block was evicted; None if unknown. evicted_for: the request that needed
      its place; empty if none did.
    """

    cause: str
    num_tokens: int
    num_cached: int
    num_known: int
    num_by_tier: dict[str, int]
    position: int | None = None
    here: str = ""
    there: str = ""
    evicted_s: float | None = None
    evicted_for: str = ""
    num_states: int = 0

    def __str__(self) -> str:
        tiers = ", ".join(f"{count:,} from {tier}" for tier, count in self.num_by_tier.items() if tier != "device")
        by = f"{self.evicted_for} needed the blocks" if self.evicted_for else "they were dropped"
        when = "earlier" if self.evicted_s is None else f"{self.evicted_s:,.1f} s ago"
        reason = CAUSES[self.cause].format(**vars(self) | {"evicted_for": by, "when": when})
        reused = f"reused {self.num_cached:,} of {self.num_tokens:,} tokens" + f" ({tiers})" * bool(tiers)
        return f"{self.cause}: {reused}: {reason}"


def read_sentence(line: str) -> tuple[str, int, int, str] | None:
    """Returns cause, num_cached, num_tokens and reason of a line that ends in a report; None for other lines."""
    if (found := _SENTENCE.search(line)) is None:
        return None
    return found[1], int(found[2].replace(",", "")), int(found[3].replace(",", "")), found[4]
