"""The rows of an experiment: its variants at each point of its grid. Knows no trials."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ksana_jax.core.config import ConfigError
from ksana_jax.core.plugins import nearest
from ksana_jax.lab.runs import dotted

# The keys that define a trial; the other keys name, order and multiply trials.
TRIAL_KEYS = ("task", "model", "load_format", "engine", "pattern", "layer_patterns", "settings")

# Resolving a trial takes about a millisecond, running it at least seconds.
MAX_TRIALS = 10_000


class Variant(NamedTuple):
    """A named row with its changes. on_grid: whether it has a row at each point of the grid, or is one row."""

    name: str
    changes: dict[str, Any]
    on_grid: bool = True


def variants_of(given: Sequence[Any]) -> list[Variant]:
    """Reads the field `variants`."""
    found = []
    for item in given:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str) or not item["name"]:
            raise ConfigError(f"each of variants needs a name that is text, {item!r:.80} has none")
        if not isinstance(on_grid := item.get("grid", True), bool):
            raise ConfigError(f"variant {item['name']!r}: grid is {on_grid!r:.80}, must be true or false")
        changes = dotted.nested({k: v for k, v in item.items() if k not in ("name", "grid")})
        _only_trial_keys(f"variant {item['name']!r}", changes)
        found.append(Variant(item["name"], changes, on_grid))
    names = [variant.name for variant in found]
    if doubled := {n for n in names if names.count(n) > 1}:
        raise ConfigError(f"variants have the same name: {', '.join(sorted(doubled))}")
    return found or [Variant("", {})]


def grid_of(given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Reads the field `grid`: {dotted key: its values}."""
    grid = dotted.flat(given)
    _only_trial_keys("grid", dotted.nested(grid))
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"grid.{key} is {values!r}, must be a list of values")
    return grid


def _only_trial_keys(where: str, changes: Mapping[str, Any]) -> None:
    for key in changes:
        if key not in TRIAL_KEYS or key == "task":
            names = [k for k in TRIAL_KEYS if k != "task"]
            raise ConfigError(f"unknown key {key!r} in {where}; the nearest is {nearest(key, names, cutoff=0.0)!r}")


def rows_of(
    variants: Sequence[Variant], grid: Mapping[str, Sequence[Any]], num_seeds: int, pinned: Mapping[str, Any]
) -> Iterator[tuple[Variant, dict[str, Any]]]:
    """Yields each row's variant and its values of the grid's keys; none outside the grid.

    Args:
      pinned: values that overrides give for all rows.

    Raises:
      ConfigError: a value would have no effect, or there are too many trials.
    """
    _check_size(variants, grid, num_seeds)
    for key, values in grid.items():
        _refuse_doubled(key, values, [variant for variant in variants if variant.on_grid])
    _refuse_pinned(pinned, variants, grid)
    for variant in variants:
        for values in itertools.product(*grid.values()) if variant.on_grid else [()]:
            yield variant, dict(zip(grid, values, strict=False))


def _check_size(variants: Sequence[Variant], grid: Mapping[str, Sequence[Any]], num_seeds: int) -> None:
    count = math.prod([len(variants), num_seeds, *map(len, grid.values())])
    if count > MAX_TRIALS:
        factors = [f"{len(variants)} variants", *(f"{len(v):,} of {k}" for k, v in grid.items()), f"{num_seeds} seeds"]
        raise ConfigError(f"{count:,} trials ({' x '.join(factors)}); supported: at most {MAX_TRIALS:,}")


def _refuse_doubled(key: str, values: Sequence[Any], variants: Sequence[Variant]) -> None:
    """Rejects a key that a variant and the grid set: the variant's value would be replaced."""
    ours = {leaf for value in values for leaf in dotted.flat(merge(dotted.nested({key: value})))}
    for variant in variants:
        for leaf in dotted.flat(merge(variant.changes)):
            if any(f"{leaf}.".startswith(f"{other}.") or f"{other}.".startswith(f"{leaf}.") for other in ours):
                set_ = f"{leaf} is set by variant {variant.name!r} and {'' if leaf == key else f'{key} '}by the grid"
                raise ConfigError(f"{set_}, so the variant's value would have no effect: leave it out of one")


def _refuse_pinned(pinned: Mapping[str, Any], variants: Sequence[Variant], grid: Mapping[str, Any]) -> None:
    for key in dotted.flat({k: v for k, v in pinned.items() if k in TRIAL_KEYS}):
        rows = [v.name for v in variants if key in dotted.flat(v.changes)] + ["the grid"] * (key in grid)
        if rows:
            way = f"; give grid.{key}=[...]" if key in grid else ""
            raise ConfigError(f"{key} is set by {', '.join(rows)}: an override for all rows would have no effect{way}")


def merge(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Merges values, later ones over earlier ones; a preset's name as pattern merges as {preset: name}."""
    return dotted.merge(
        *(
            {**part, "pattern": {"preset": part["pattern"]}} if isinstance(part.get("pattern"), str) else part
            for part in parts
        )
    )
