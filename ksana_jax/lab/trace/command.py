"""Words of `ksana trace run`; runs and prints `ksana trace replay`, and `ksana compare` of recordings."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ksana_jax.core.config import ConfigError
from ksana_jax.core.files import write_atomic
from ksana_jax.lab import recording
from ksana_jax.lab.runs.command import show_comparison
from ksana_jax.lab.runs.config import load
from ksana_jax.lab.runs.dotted import dotlist
from ksana_jax.lab.trace import differences, step_parts
from ksana_jax.lab.trace.bundle import check_new
from ksana_jax.lab.trace.replay import make_llm, replay

# Commands that build engines in this process.
TRACEABLE = ("bench", "generate", "chat", "lm-eval")


def replay_and_show(
    path: Path, overrides: Sequence[str], out: Path | None, as_json: bool, own_code: bool = False
) -> int:
    """Replays a recording and prints the result; returns the exit code: 1 if it differed and no setting was changed.

    Args:
      out: folder for the recording of the replay; None writes none.
      own_code: import own code that the recording names.
    """
    made = recording.read_decisions(path)
    settings = dotlist(list(overrides))
    if out is not None:
        check_new(out)
    engine = make_llm(made, settings, own_code=own_code).engine
    done = replay(made, engine, to_the_end=bool(settings), own_code=own_code)
    what = f"{done.num_steps:,} steps of {len(made.steps):,}, {made.num_requests:,} requests"
    if done.difference is None:
        print(f"{what}: the same decisions, blocks and tokens")
    else:
        print("\n".join([what, *done.difference.lines()]))
        print(_hardware(made, engine), end="")
    if out is not None:
        done.recorder.write(out / recording.NAME)
        print(f"{out}: {recording.NAME}")
    if as_json:
        found = None if done.difference is None else dataclasses.asdict(done.difference)
        print(json.dumps({"steps": done.num_steps, "recorded_steps": len(made.steps), "difference": found}))
    return int(done.difference is not None and not settings)


def _hardware(made: recording.Recording, engine: Any) -> str:
    """Prints the recording's machine and versions where they differ from these."""
    import jax

    here = {"device": jax.devices()[0].device_kind, "implementation": engine.executor.implementation.name}
    lines = [f"recorded with {k} {made.header[k]}, here {v}\n" for k, v in here.items() if made.header[k] != v]
    return "".join(lines)


def _outputs(a: dict[str, list[int]], b: dict[str, list[int]], differing: dict[str, int]) -> str:
    """Prints the sequences with other tokens."""
    if not differing:
        return f"all {len(a):,} sequences have the same tokens"
    name, at = next(iter(differing.items()))
    here = [str(of[name][at]) if len(of.get(name, ())) > at else "none" for of in (a, b)]
    return (
        f"{len(differing):,} of {len(a):,} sequences have other tokens; {name} from output token {at}: "
        + " and ".join(here)
    )


def compare_recordings(a: Path, b: Path, out: Path | None, as_json: bool) -> None:
    """Prints where two recordings diverge: settings, requests, the first step with other decisions or blocks, tokens.

    Of two traces with profiles it also prints the time by part of the network.

    Args:
      out: folder for compare.json, and parts.md, parts.tex and parts.json of traces; None writes nothing.
    """
    sides = recording.read(a), recording.read(b)
    folders = {side.path.resolve().parents[1] for side in sides if step_parts.by_kind(side.steps)}
    if len(folders) == 2 and all((folder / "trace.json").is_file() for folder in folders):
        show_comparison(step_parts.comparison(*sides), out, as_json, "parts")
        if not all(side.header.get("decisions") for side in sides):
            return
    left, right = recording.read_decisions(a), recording.read_decisions(b)
    settings, requests = differences.other_settings(left, right), differences.other_requests(left, right)
    found = differences.first_differences(left, right)
    for name, values in settings.items():
        print(f"{name}: " + " and ".join(f"{value!s:.60}" for value in values))
    if requests is not None:
        print(f"The requests are not the same: {requests}")
    for kind in ("rows", "blocks"):
        if (difference := found.get(kind)) is None:
            print(f"no {differences.WORDS[kind]} differs in {len(left.steps):,} steps")
        else:
            print("\n".join(difference.lines("A", "B")))
    tokens = differences.other_tokens(left, right)
    print(_outputs(differences.outputs(left), differences.outputs(right), tokens))
    plain = {
        "settings": settings,
        "requests": requests,
        "steps": [len(left.steps), len(right.steps)],
        "differences": {kind: dataclasses.asdict(difference) for kind, difference in found.items()},
        "tokens": tokens,
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / "compare.json", json.dumps(plain) + "\n")
    if as_json:
        print(json.dumps(plain))


def command_line(target: Sequence[str], commands: Collection[str], out: Path) -> list[str]:
    """Returns the words of the `ksana` command to run for a target.

    Args:
      target: the words of a command, or an experiment and its overrides, which `run` runs into a folder of `out`.
      commands: that exist.

    Raises:
      ConfigError: there is neither a command nor an experiment of that name, or it builds no engine.
    """
    if target[0] in TRACEABLE:
        return list(target)
    if target[0] in commands:
        raise ConfigError(f"ksana {target[0]} builds no engine: trace an experiment or one of {', '.join(TRACEABLE)}")
    experiment = list(itertools.takewhile(lambda word: not word.startswith("-"), target))
    if experiment:
        load(experiment[0], experiment[1:])  # says what is wrong before anything is written
    return ["run", *target, "--out", str(out / "run")]
