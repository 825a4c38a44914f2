"""vLLM's names of settings that have another name here, and the error of unknown keywords. No jax."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import nearest
from ksana_jax.core.units import GIB

PAGE = "docs/use/coming-from-vllm.md"


def _from_gib(value: Any) -> Any:
    return int(value * GIB) if checks.is_number(value) else value


def _fraction(value: Any) -> Any:
    return float(value) if checks.is_integer(value) else value


# The name here of each keyword of vLLM's `LLM`, and what converts its value.
RENAMED = {
    "gpu_memory_utilization": ("memory_fraction", _fraction),
    "num_gpu_blocks_override": ("num_blocks", lambda value: value),
    "swap_space": ("host_cache_bytes", _from_gib),
    "preemption_mode": ("preempt", lambda value: value),
}


def translated(given: Mapping[str, Any], known: Set[str]) -> dict[str, Any]:
    """Translates keywords of `LLM`, of which some have vLLM's names, to this engine's.

    Args:
      known: names that are valid here.

    Raises:
      ConfigError: a name is unknown, or one setting is given under both names.
    """
    refuse_unknown("LLM", given, [*known, *RENAMED])
    found = {name: value for name, value in given.items() if name not in RENAMED}
    for name in RENAMED.keys() & given.keys():
        here, converted = RENAMED[name]
        if here in found:
            raise ConfigError(f"{name} and {here} are two names of one setting; give only one")
        found[here] = converted(given[name])
    return found


def refuse_unknown(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ConfigError for the first keyword that is not known, with the nearest one.

    Args:
      where: what takes the keywords, for the message.
    """
    for name in given:
        if name not in known:
            close = nearest(name, known)
            hint = f"; the nearest is {close!r}" if close else ""
            raise ConfigError(f"{where} has no setting {name!r}{hint}; see {PAGE}")
