"""`ksana plan` for several models that share a device: the memory of all of them, awake or asleep."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ksana_jax.core.config import ConfigError
from ksana_jax.core.units import byte_size
from ksana_jax.runner.planner.devices import find_device
from ksana_jax.runner.planner.solve import Plan, plan


@dataclasses.dataclass(frozen=True)
class Shared:
    """Bytes of several models on one device, or on each of several.

    plans: of each model alone. all_awake: with the pools of all of them. least: the largest need of one model that is
    awake while the others sleep; `ksana serve --device-memory-bytes` takes any number from it to all_awake.
    asleep: of each model, which is its weights where the device shares the host's memory (level 1), else 0.
    """

    plans: tuple[Plan, ...]
    asleep: tuple[int, ...]
    budget_bytes: int
    all_awake: int
    least: int


def plan_several(
    models: Sequence[str], device: str, *, say: Callable[[str], Any] | None = None, **request: Any
) -> Shared:
    """Plans the memory of models with equal settings.

    Args:
      request: fields of `PlanRequest`; batch and context are of each model.

    Raises:
      ConfigError: there is no batch or context, which would be the largest that fits alone.
    """
    for name in ("batch", "context"):
        if request.get(name) is None:
            raise ConfigError(f"{len(models)} models are given, so {name} must be too: each takes as much as it says")
    plans = tuple(plan(model, device, say=say, **request) for model in models)
    stays = find_device(device).name == "cpu"  # weights stay there in sleep of level 1
    asleep = tuple(found.weights_bytes * stays for found in plans)
    one = [found.total_bytes + sum(asleep) - own for found, own in zip(plans, asleep, strict=True)]
    return Shared(plans, asleep, plans[0].budget_bytes, sum(found.total_bytes for found in plans), max(one))


def main(models: Sequence[str], device: str, *, as_json: bool = False, **request: Any) -> None:
    """Prints the memory of each model and of all; with as_json, the last line is one JSON object.

    Raises:
      ConfigError: the request is invalid or, after the plan was printed, not even one model fits besides sleeping ones.
    """
    found = plan_several(models, device, say=functools.partial(print, file=sys.stderr, flush=True), **request)
    console, budget = Console(highlight=False), found.budget_bytes
    first = found.plans[0]
    console.print(escape(f"{first.device}: {first.request.memory_fraction:.0%} is {byte_size(budget)}"))
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(("", "weights", "a step", "KV", "awake", "asleep")):
        table.add_column(name, justify="right" if index else "left", no_wrap=index > 0)
    for own, asleep in zip(found.plans, found.asleep, strict=True):
        kv = own.kv_bytes_per_token * own.tokens_held
        parts = own.weights_bytes, own.total_bytes - own.weights_bytes - kv, kv, own.total_bytes, asleep
        table.add_row(escape(own.model), *map(byte_size, parts))
    console.print(table)
    for name, num_bytes in (("all awake", found.all_awake), ("one awake, the others asleep", found.least)):
        left = budget - num_bytes
        fits = f"fits, {byte_size(left)} left" if left >= 0 else f"{byte_size(-left)} too much"
        console.print(f"{name:<30}{byte_size(num_bytes)}: {fits}")
    console.print(
        f"ksana serve needs --device-memory-bytes {found.least} or more; from {found.all_awake} on, none sleeps"
    )
    if as_json:
        print(json.dumps(dataclasses.asdict(found)), flush=True)
    if found.least > budget:
        raise ConfigError(f"the largest model does not fit on {first.device} while the others sleep")
