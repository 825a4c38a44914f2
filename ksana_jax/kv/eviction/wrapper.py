"""Eviction methods around other methods."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any

from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.eviction.base import EvictionMethod

# Settings of all methods: when to evict, and how many tokens.
COMMON = tuple(field.name for field in dataclasses.fields(EvictionMethod))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvictionWrapper(EvictionMethod):
    """An eviction method around another, whose tokens and numbers it keeps unless a subclass changes them. Base of all
    such methods.

    Settings of all methods, such as the budget, are given to the wrapper and hold for the method inside; their defaults
    are the inner method's.

    Args:
      of: the method inside, {"method": a name} and its own settings; or an `EvictionMethod`.
    """

    of: Any = None
    budget: Any = None
    sinks: Any = None
    recent: Any = None
    interval: Any = None
    prompts: Any = None
    layers: Any = None
    beta: Any = None
    positions: Any = None
    memory: Any = None

    def __post_init__(self):
        defaults = self._read("of")
        for setting in COMMON:
            if getattr(self, setting) is None:
                object.__setattr__(self, setting, defaults[setting])
        _ = self.inner  # which refuses what does not suit it
        super().__post_init__()

    def _read(self, field: str) -> dict[str, Any]:
        """Reads the method in a field; returns its defaults of the settings of all methods."""
        name, given = f"kv_eviction {type(self).__name__}", getattr(self, field)
        if not isinstance(given, (EvictionMethod, Mapping)):
            raise ConfigError(f"{name}: {field} is {given!r:.80}, must be a method such as {{'method': 'snapkv'}}")
        method = given if isinstance(given, EvictionMethod) else read_eviction(given)
        assert method is not None
        defaults = _defaults(method)
        if has := [
            x for x in COMMON if (x in given if isinstance(given, Mapping) else getattr(given, x) != defaults[x])
        ]:
            raise ConfigError(
                f"{name}: {field} has {', '.join(has)}: budget and timing belong next to {field}, not inside it"
            )
        object.__setattr__(self, field, method)
        return defaults

    @functools.cached_property
    def inner(self) -> EvictionMethod:
        """The method inside, with this one's settings of all methods."""
        return self._with_common(self.of)

    def _with_common(self, method: EvictionMethod) -> EvictionMethod:
        return dataclasses.replace(method, **{name: getattr(self, name) for name in COMMON})

    def encoded(self, tokenizer: Any) -> EvictionMethod:
        return dataclasses.replace(self, of=self.of.encoded(tokenizer))

    @property
    def compiled(self) -> EvictionMethod:
        inner = self.inner.compiled
        common = {name: getattr(inner, name) for name in COMMON}
        if self.per_head or self.measures:  # with any other it is refused
            common["prompts"] = self.prompts
        return dataclasses.replace(self, of=bare(inner), **common)

    @property
    def setting(self) -> dict[str, Any]:
        return super().setting | {"of": own_setting(self.of)}


# Attributes and methods that are the inner method's, unless a subclass defines its own.
for _name in (
    "observes score_reduction probes probe resets_scores custom_logits needs_full_text per_head across_layers "
    "priority merges merge low_codec low_slots balances low_factors head_by_head once needs_text_positions num_known "
    "given query_numbers query_factor observed_logits constants reads_ropes reads_outputs state_shape observe stored "
    "shares measures measure budgets num_scores observed"
).split():
    setattr(EvictionWrapper, _name, property(operator.attrgetter(f"inner.{_name}")))


def bare(method: EvictionMethod) -> EvictionMethod:
    """Returns a method with the defaults of the settings of all methods."""
    return dataclasses.replace(method, **_defaults(method))


def own_setting(method: EvictionMethod) -> dict[str, Any]:
    """Returns a method as a setting without the settings of all methods."""
    return {name: value for name, value in method.setting.items() if name not in COMMON}


def _defaults(method: EvictionMethod) -> dict[str, Any]:
    """Returns the defaults of the settings of all methods; a wrapper has its inner method's."""
    inside = _defaults(method.of) if isinstance(method, EvictionWrapper) else {}
    own = {field.name: field.default for field in dataclasses.fields(method) if field.name in COMMON}
    return own | {name: inside[name] for name, value in own.items() if value is None and inside}
