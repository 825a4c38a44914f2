"""Settings and properties of an eviction method that exclude each other."""

from __future__ import annotations

from typing import Any


def problems_of(method: Any) -> list[str]:
    """Returns one sentence for each; method: an `EvictionMethod`."""
    return [*_of_memory(method), *_of_low_codec(method)]


def _of_memory(method: Any) -> list[str]:
    hides, found = method.hides, []
    if method.per_head and not (hides or method.measures):
        found.append('memory is "freed", but its heads keep different numbers of tokens: set it to "simulated"')
    if method.per_head and not method.once:
        found.append(f"prompts is {method.prompts!r}, must be 'once': another eviction would compare unequal heads")
    if method.measures:
        found += _of_budgets(method)
    if hides and method.positions == "cache":
        found.append('positions "cache" need memory "freed": hidden tokens keep their places in the cache')
    if hides and method.merges:
        found.append('memory "simulated" hides evicted tokens, but the method merges them into others')
    if hides and method.custom_logits:
        found.append('memory is "simulated", but its logits depend on a token\'s place in the cache')
    return found


def _of_budgets(method: Any) -> list[str]:
    found = []
    if not method.once:
        found.append(f"prompts is {method.prompts!r}, must be 'once': budgets are measured when a prompt is complete")
    if method.hides:
        found.append('memory is "simulated", must be "freed": budgets that are measured divide memory')
    if method.layers != "uniform":
        found.append(f"layers is {method.layers!r}, must be 'uniform': its budgets are measured")
    if method.needs_full_text:
        found.append("it measures budgets of texts that it has computed, and its method must know them beforehand")
    return found


def _of_low_codec(method: Any) -> list[str]:
    reasons = {
        "hides": 'memory "simulated" hides tokens',
        "merges": "it merges tokens",
        "per_head": "its heads keep different numbers of tokens",
        "measures": "its budgets are measured",
        "custom_logits": "its logits depend on a token's place in the cache",
    }
    found = [reason for name, reason in reasons.items() if getattr(method, name)]
    found += ['positions "cache" give each slot one position'] * (method.positions == "cache")
    return [f"{reason}, and tokens in {method.low_codec} share slots" for reason in found if method.low_codec]
