"""The sections in running order, and their time limits. No jax."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of the measurement, with a process of its own.

    module: in `experiments.gpu.sections`, with `run(context)`. most_s: seconds after which it is ended. least_s:
    seconds that sections before it must leave to it. memory: part of the device's memory that jax takes at once; the
    rest is for torch in the process next to it.
    """

    name: str
    module: str
    most_s: int
    least_s: int
    memory: float = 0.55


# The limits add up to more than there is: most sections end long before theirs. `least_s` keeps the late ones alive.
SECTIONS = (
    Section("environment", "environment", 30, 10),
    Section("correctness", "correctness", 75, 25),
    Section("operators", "operators", 45, 15),
    Section("ceilings", "ceilings", 35, 15),
    Section("decode", "decode", 130, 60),
    Section("step", "step", 110, 45, 0.92),
    Section("latents", "latents", 45, 15),
    Section("prefill", "prefill", 55, 20),
    Section("quantised", "quantised", 60, 12),
    Section("engine", "engine", 120, 25, 0.85),
    Section("throughput", "throughput", 80, 25, 0.92),
    Section("products", "products", 90, 10),
    Section("kv_write", "kv_write", 60, 8),
    Section("mixed", "mixed", 30, 10),
    Section("shared", "shared", 45, 10),
    Section("window", "window", 45, 10),
    Section("decode16", "decode16", 60, 10),
    Section("counters", "counters", 80, 20),
    Section("transformers", "transformers", 60, 20),
)
TOTAL_S = 9 * 60
# Part of TOTAL_S: to end the last process and print the table.
CLOSING_S = 5
# Seconds between asking a section to stop and ending it.
GRACE_S = 4


def by_name(name: str) -> Section:
    """The section of a name.

    Raises:
      ValueError: there is none; the message names all.
    """
    for section in SECTIONS:
        if section.name == name:
            return section
    raise ValueError(f"no section {name!r}; sections are {', '.join(s.name for s in SECTIONS)}")


def limit_s(index: int, chosen: list[Section], left_s: float, total_s: float = TOTAL_S) -> float:
    """Seconds that a section may take when `left_s` are left for it and all that follow; with a longer total than
    TOTAL_S, each may take longer as well."""
    most_s = chosen[index].most_s * max(total_s / TOTAL_S, 1)
    return min(most_s, left_s - sum(s.least_s for s in chosen[index + 1 :]))
