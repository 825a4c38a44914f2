"""`ksana run`, `reproduce`, `report` and `compare`: run experiments and show their results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ksana_jax.cli import completion
from ksana_jax.cli.options import AsJson, Experiment, Out, Overrides, OwnCode

if TYPE_CHECKING:
    from ksana_jax.lab.runs.on_ray import OnRay


def run(
    context: typer.Context,
    file: Experiment,
    overrides: Overrides = None,
    out: Out = None,
    shard: Annotated[
        str, typer.Option(help="k/n: run the k-th of n parts; slurm: the part of this task of a Slurm job array")
    ] = "1/1",
    on: Annotated[str, typer.Option(help="where trials run: local (this process), or ray (a Ray cluster)")] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="with --on ray: HOST:PORT of a cluster, auto (RAY_ADDRESS, or the cluster of this machine), "
            "or local (a cluster of this machine alone, which ends with the command)",
            show_default="auto",
        ),
    ] = None,
    num_cpus: Annotated[
        float | None,
        typer.Option(help="with --on ray: CPUs of one trial", show_default="the node's, shared by its GPUs"),
    ] = None,
    num_gpus: Annotated[
        float | None,
        typer.Option(help="with --on ray: GPUs of one trial", show_default="1 if the cluster has any"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="skip the confirmation for runs over an hour")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only say which trials would run, and about how long")
    ] = False,
) -> None:
    """Runs or resumes an experiment; prints its table and draws its figure."""
    from ksana_jax.native import build

    elsewhere = _elsewhere(on, {"--ray-address": ray_address, "--num-cpus": num_cpus, "--num-gpus": num_gpus})
    if elsewhere is None:
        build.begin()
    from ksana_jax.lab.runs.command import run_and_report

    debug = context.find_root().params["debug"]
    given = {"debug": debug, "on_ray": elsewhere, "yes": yes, "dry_run": dry_run}
    raise typer.Exit(run_and_report(file, overrides or [], out, shard, **given))


def _elsewhere(on: str, options: Mapping[str, Any]) -> OnRay | None:
    """Returns the cluster that options name; None is this process."""
    from ksana_jax.core.errors import ConfigError

    if on not in ("local", "ray"):
        raise ConfigError(f"--on is {on!r}, must be local or ray")
    given = {name: value for name, value in options.items() if value is not None}
    if on == "local" and given:
        raise ConfigError(f"{', '.join(given)}: only with --on ray")
    if on == "local":
        return None
    from ksana_jax.engine.distributed.ray_connection import AUTO
    from ksana_jax.engine.distributed.ray_places import Resources
    from ksana_jax.lab.runs.on_ray import OnRay

    resources = Resources(given.get("--num-cpus"), given.get("--num-gpus"))
    return OnRay(given.get("--ray-address", AUTO), resources)


def schema() -> None:
    """Prints the JSON Schema of experiment files, by which editors complete and check them."""
    import json

    from ksana_jax.lab.runs.schema import schema

    print(json.dumps(schema(), indent=1, ensure_ascii=False))


def reproduce(
    paper: Annotated[
        str,
        typer.Argument(help="name of the paper; `ksana list papers` lists them", autocompletion=completion.papers),
    ],
    full: Annotated[bool, typer.Option("--full", help="run the longer study")] = False,
    out: Annotated[Path | None, typer.Option(help="output folder", show_default="runs/papers/PAPER")] = None,
) -> None:
    """Repeats a paper's measurement; prints the published numbers next to ours.

    Numbers of different models and texts are not comparable; their order between rows is. Pairs of rows whose
    difference is within the noise count for neither side.
    """
    from ksana_jax.lab.runs import papers

    raise typer.Exit(papers.reproduce(paper, full, out))


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="folders that `ksana run` wrote", show_default=False),
    ],
    out: Annotated[
        Path | None, typer.Option(help="folder for table and figure", show_default="the run's; none for several runs")
    ] = None,
    csv: Annotated[
        bool, typer.Option("--csv", help="print a run as CSV instead: a row per finished trial, with all its numbers")
    ] = False,
    own_code: OwnCode = False,
) -> None:
    """Redraws the table and figure of a run, combines several runs, or prints a run as CSV.

    Runs that scored different texts are refused, because their numbers are not comparable.
    """
    from ksana_jax.core.errors import ConfigError
    from ksana_jax.lab.runs.command import report_and_show
    from ksana_jax.lab.runs.export import export

    trusted = None if own_code else ()
    if not csv:
        return report_and_show(folders, out, trusted)
    if out is not None or len(folders) > 1:
        raise ConfigError("--csv prints one run to standard output: give one folder and no --out")
    print(export(folders[0], trusted), end="")


def compare(
    a: Annotated[Path, typer.Argument(help="a folder that `ksana run` wrote, or a recording", show_default=False)],
    b: Annotated[
        Path | None, typer.Argument(help="the run or recording to compare with it", show_default=False)
    ] = None,
    against: Annotated[
        str, typer.Option(help="compare the rows of run A with this one: its name or label", show_default="none")
    ] = "",
    row: Annotated[
        list[str] | None, typer.Option(help="only this row, by name or label; repeatable", show_default="all")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for compare.md, compare.tex and compare.json", show_default="none")
    ] = None,
    as_json: AsJson = False,
    own_code: OwnCode = False,
) -> None:
    """Compares two runs row by row, or rows of one run with one of them, with a paired t-test for each number.

    Rows of one run: `ksana compare runs/keydiff --against SnapKV`, or only one with `--row KeyDiff`. Over a grid, a row
    is compared with the one at the same point.

    Rows with the nearest settings are paired. Runs that scored different texts are refused. `ksana report A B`
    shows the same runs in one table and figure, without a test.

    For two recordings (`ksana trace run --record`), shows the first step where their decisions and blocks differ,
    and which sequences have other tokens; for two traces with profiles, times by part of the network.
    """
    from ksana_jax.core.errors import ConfigError
    from ksana_jax.lab.recording import is_recording
    from ksana_jax.lab.runs.command import compare_and_show
    from ksana_jax.lab.trace.command import compare_recordings

    if (b is None) == (not against) or (row and not against):
        raise ConfigError("give two runs, or one run and a row of it: ksana compare RUN --against ROW")
    if b is not None and is_recording(a) and is_recording(b):
        return compare_recordings(a, b, out, as_json)
    compare_and_show(a, b, against, row or (), out, as_json, None if own_code else ())
