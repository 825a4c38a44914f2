"""`ksana trace pool`: runs one trial and shows its memory as numbers, pictures and a list of blocks."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError
from ksana_jax.core.files import write_atomic
from ksana_jax.core.units import byte_size
from ksana_jax.engine.inspect.pool_trace import PoolTrace
from ksana_jax.engine.inspect.snapshot import Snapshot, take_snapshot
from ksana_jax.engine.residents import resident_bytes
from ksana_jax.lab.runs import figures, plain_json, pool_figure
from ksana_jax.lab.runs.config import Plan, Trial, load
from ksana_jax.lab.runs.environment import environment
from ksana_jax.lab.runs.tasks import task_named
from ksana_jax.lab.runs.trials import Context, EnginePool

if TYPE_CHECKING:
    from ksana_jax import LLM
    from ksana_jax.engine.engine import Engine

FIGURE_INCHES = 5.2
FILES = "pool.png, pool.pdf, pool.json, pool.npz, blocks.txt"


class SnapshotChooser:
    """Keeps the snapshot of a given step, or of one where the pool was nearly fullest.

    Args:
      step: counted from 1; None takes the fullest to within a tenth, because a snapshot of every fuller step would take
        longer than the steps themselves.
    """

    def __init__(self, trace: PoolTrace, step: int | None = None):
        self.step, self.snapshot = 0, None
        self._trace, self._wanted, self._most = trace, step, 0

    snapshot: Snapshot | None

    def observe(self, engine: Engine) -> None:
        """Takes a snapshot of the step that the trace has just recorded, if it is the one to keep."""
        now, held = self._trace.num_steps, engine.memory.blocks.num_used
        if now == 1:
            self.step, self.snapshot, self._most = 0, None, 0
        if now == self._wanted if self._wanted else held >= 1.1 * self._most and held:
            self.step, self.snapshot, self._most = now, take_snapshot(engine), held


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The result of an inspection. numbers: plain values, see `numbers_of`."""

    trial: Trial
    numbers: dict[str, Any]
    trace: PoolTrace
    moment: SnapshotChooser


def inspect(
    plan: Plan, row: int = 1, step: int | None = None, make_llm: Callable[..., LLM] | None = None
) -> Inspection:
    """Runs the first trial of one row of a plan.

    A task that times several runs clears the engine's records before each, so the result shows the last run.

    Args:
      row: counted from 1. step: see `SnapshotChooser`. make_llm: see `run.run`.

    Raises:
      ConfigError: there is no such row or step, or the engine took no step.
    """
    if not 1 <= row <= len(plan.rows):
        raise ConfigError(f"row is {row}, {plan.name} has rows 1 to {len(plan.rows)}")
    checks.require(checks.integer("step", step, optional=True), error=ConfigError)
    trial = plan.rows[row - 1].trials[0]
    pool = EnginePool(plan.max_repositioned_sinks, make_llm)
    llm = pool.get(trial)
    trace = PoolTrace(llm.engine)
    moment = SnapshotChooser(trace, step)
    llm.engine.observers.append(moment.observe)
    task = task_named(trial.config["task"])
    measurements = list(task.run(Context(trial, pool, lambda fraction: None)))
    if not trace.num_steps:
        raise ConfigError(f"{trial.label}: the engine took no step, so there is nothing to show")
    if moment.snapshot is None and step is not None:
        raise ConfigError(f"step is {step}, {trial.label} took steps 1 to {trace.num_steps}")
    return Inspection(trial, numbers_of(llm, trace) | {"task": task.summarise(measurements)}, trace, moment)


def numbers_of(llm: LLM, trace: PoolTrace) -> dict[str, Any]:
    """Summarises a trace as plain values; means are over steps.

    memory_bytes: of weights with adapters and pool, as in `engine.residents`, and of the host tier.
    utilisation, peak_utilisation: fraction of the device's blocks held, mean after steps and maximum during a step.
    host_utilisation: fraction of the host's slots held.
    fragmentation: fraction of the held slots without a token (unused space in last blocks).
    peak_blocks, peak_unshared_blocks: maximum held, and maximum that sequences would hold without sharing.
    shared_saving: fraction of the unshared blocks that sharing saves, over all steps.
    hit_rate: fraction of the prompts' tokens found in the cache. hit_blocks: hits by tier.
    blocks_by_origin: blocks that rows obtained, see `kv.state.Origin`.
    """
    records, columns, counters = llm.records, trace.columns, trace.counters
    device = [c.pools["device"] for c in columns]
    unshared = sum(r.unshared_blocks for r in records)
    asked = counters["queried_tokens"]
    return {
        "num_steps": trace.num_steps,
        "seconds": columns[-1].time_s,
        "num_blocks": llm.num_blocks,
        "block_bytes": llm.block_bytes,
        "memory_bytes": {**resident_bytes(llm), "host_tier": llm.config.host_cache_bytes},
        "utilisation": _mean([p.held for p in device]) / llm.num_blocks,
        "peak_utilisation": max(r.peak_blocks for r in records) / llm.num_blocks,
        **(
            {"host_utilisation": _mean([c.pools["host"].held / len(c.pools["host"].owners) for c in columns])}
            if "host" in columns[0].pools
            else {}
        ),
        "fragmentation": _mean([p.fragmentation for p in device if p.held]),
        "peak_blocks": max(r.peak_blocks for r in records),
        "peak_unshared_blocks": max(r.unshared_blocks for r in records),
        "shared_saving": 1 - sum(r.peak_blocks for r in records) / unshared if unshared else 0.0,
        "hit_rate": counters["hit_tokens"] / asked if asked else 0.0,
        "hit_blocks": {tier: counters[f"hits_{tier}"] for tier in ("device", "host", "disk")},
        "blocks_by_origin": trace.num_blocks_by_origin,
        "replaced_blocks": {"device": counters["replaced"], "host": counters["replaced_host"]},
        "swapped_blocks": {"out": counters["swapped_out"], "in": counters["swapped_in"]},
        "moved_bytes": columns[-1].moved_bytes,
    }


def write(seen: Inspection, folder: Path) -> None:
    """Writes the files named in FILES."""
    folder.mkdir(parents=True, exist_ok=True)
    columns, moment = seen.trace.columns, seen.moment
    drawn = figures.render(lambda figure: pool_figure.draw(figure, columns), FIGURE_INCHES)
    for kind, content in drawn.items():
        write_atomic(folder / f"pool.{kind}", content)
    content = {
        "label": seen.trial.label,
        "seed": seen.trial.seed,
        "config": seen.trial.config,
        "environment": environment(),
        "numbers": seen.numbers,
        "requests": list(seen.trace.requests),
        "steps": [
            {
                "step": c.step,
                "time_s": c.time_s,
                "held": {t: p.held for t, p in c.pools.items()},
                "fragmentation": c.pools["device"].fragmentation,
                "moved_bytes": c.moved_bytes,
            }
            for c in columns
        ],
    }
    write_atomic(folder / "pool.json", plain_json.dumps(content) + "\n")
    arrays: dict[str, Any] = {"step": [c.step for c in columns]}
    for tier in columns[0].pools:
        arrays[f"{tier}_owners"] = np.stack([c.pools[tier].owners for c in columns])
        arrays[f"{tier}_shared"] = np.stack([c.pools[tier].shared for c in columns])
    np.savez_compressed(file := io.BytesIO(), **arrays)
    write_atomic(folder / "pool.npz", file.getvalue())
    # A text of one step is released with it.
    blocks = moment.snapshot or f"no step of {seen.trace.num_steps:,} left a block in use"
    write_atomic(folder / "blocks.txt", f"after step {moment.step}\n{blocks}\n")


def inspect_and_show(
    file: Path, overrides: Sequence[str], out: Path | None, row: int, step: int | None, as_json: bool
) -> None:
    """Inspects one trial of an experiment file, writes the files named in FILES and prints the numbers."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    plan = load(file, overrides)
    seen = inspect(plan, row, step)
    folder = out or Path("runs") / plan.name
    write(seen, folder)
    table = Table(
        title=escape(f"{plan.title or plan.name}: {seen.trial.label}, seed {seen.trial.seed}"),
        show_header=False,
        title_justify="left",
        box=None,
    )
    for name, value in readable(seen.numbers):
        table.add_row(escape(name), escape(value))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{escape(str(folder))}: {FILES} (of step {seen.moment.step})")
    if as_json:
        print(plain_json.dumps(seen.numbers))


def readable(numbers: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (name, value with unit) lines for the terminal."""
    n = numbers

    def parts(found: dict[str, int], write: Callable[[int], str] = "{:,}".format) -> str:
        return ", ".join(f"{write(v)} {k}" for k, v in found.items() if v) or "none"

    lines = [
        ("steps", f"{n['num_steps']:,} in {n['seconds']:.2f} s"),
        ("memory", parts(n["memory_bytes"], byte_size).replace("_", " ")),
        (
            "utilisation",
            f"{n['utilisation']:.1%} of {n['num_blocks']:,} blocks after a step, "
            f"{n['peak_utilisation']:.1%} at most within one",
        ),
        ("fragmentation", f"{n['fragmentation']:.1%} of the slots held"),
        (
            "sharing",
            f"{n['peak_blocks']:,} blocks at most, {n['peak_unshared_blocks']:,} unshared; "
            f"{n['shared_saving']:.1%} saved over all steps",
        ),
        ("prefix hits", f"{n['hit_rate']:.1%} of the prompts' tokens; blocks: {parts(n['hit_blocks'])}"),
        ("blocks by origin", parts(n["blocks_by_origin"])),
        ("replaced", parts(n["replaced_blocks"])),
        ("swapped", parts(n["swapped_blocks"])),
        ("moved", parts(n["moved_bytes"], byte_size)),
    ]
    if "host_utilisation" in n:
        lines.insert(2, ("host utilisation", f"{n['host_utilisation']:.1%}"))
    return lines


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
