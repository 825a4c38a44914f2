"""Speculative decoding: proposers of draft tokens, rules that accept them, and how many are drafted.

One file and one entry of PROPOSERS each. A proposer of your own needs no entry:
`speculative_config={"method": "my_package.module:Mine", "num_speculative_tokens": 4}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.plugins import read_method
from ksana_jax.scheduler.speculative.base import SpeculativeMethod

PROPOSERS: dict[str, str] = {
    "ngram": "ksana_jax.methods.proposers.ngram:NGram",
    "trie": "ksana_jax.methods.proposers.trie:TrieLookup",
    "suffix": "ksana_jax.methods.proposers.suffix:Suffix",
    "jacobi": "ksana_jax.methods.proposers.jacobi:Jacobi",
    "grammar": "ksana_jax.methods.proposers.grammar:Grammar",
    "draft_model": "ksana_jax.engine.draft_models.draft_model:DraftModel",
    "bild": "ksana_jax.engine.draft_models.bild:Bild",
}


def read_speculative(setting: Mapping[str, Any] | SpeculativeMethod | None) -> SpeculativeMethod | None:
    """Returns the method of `EngineConfig.speculative_config`; None drafts nothing.

    Args:
      setting: {"method": a key of PROPOSERS or "package.module:Class", and the fields of that class}.

    Raises:
      ConfigError: the method or a field does not exist, or a value is out of range.
    """
    if setting is None or isinstance(setting, SpeculativeMethod):
        return setting
    example = '{"method": "ngram", "num_speculative_tokens": 4}'
    return read_method(setting, PROPOSERS, SpeculativeMethod, "speculative_config", example)


def draft_lengths(config: EngineConfig) -> dict[int, int]:
    """Returns the numbers of draft tokens for which an engine's steps are compiled, with the maximum rows of each; {}
    without speculation."""
    method = read_speculative(config.speculative_config)
    return {} if method is None else method.draft_lengths


def draws_trees(config: EngineConfig) -> bool:
    """True if an engine's steps may have drafts that branch."""
    method = read_speculative(config.speculative_config)
    return method is not None and method.draws_trees
