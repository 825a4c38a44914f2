"""`ksana run`, `reproduce`, `report`, `compare`, `export` and `inspect`: runs experiments and shows their results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ksana_jax.cli.options import AsJson, Experiment, Out, Overrides, OwnCode

if TYPE_CHECKING:
    from ksana_jax.lab.experiments.on_ray import OnRay


def run(
    context: typer.Context,
    file: Experiment,
    overrides: Overrides = None,
    out: Out = None,
    shard: Annotated[str, typer.Option(help="k/n: run the k-th of n parts, for job arrays")] = "1/1",
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
    yes: Annotated[bool, typer.Option("--yes", help="do not ask before a run of more than an hour goes on")] = False,
) -> None:
    """Runs or resumes an experiment; prints its table and writes its figure."""
    from ksana_jax.native import build

    elsewhere = _elsewhere(on, {"--ray-address": ray_address, "--num-cpus": num_cpus, "--num-gpus": num_gpus})
    if elsewhere is None:
        build.begin()
    from ksana_jax.lab.experiments.command import run_and_report

    debug = context.find_root().params["debug"]
    raise typer.Exit(run_and_report(file, overrides or [], out, shard, debug=debug, on_ray=elsewhere, yes=yes))


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
    from ksana_jax.lab.experiments.on_ray import OnRay

    resources = Resources(given.get("--num-cpus"), given.get("--num-gpus"))
    return OnRay(given.get("--ray-address", AUTO), resources)


def reproduce(
    paper: Annotated[str | None, typer.Argument(help="its name", show_default="lists all")] = None,
    full: Annotated[bool, typer.Option("--full", help="run the longer study")] = False,
    out: Annotated[Path | None, typer.Option(help="output folder", show_default="runs/papers/PAPER")] = None,
) -> None:
    """Runs the study that repeats a paper's measurement; prints the published numbers beside ours.

    Numbers of different models and texts are not comparable; their order between rows is. Pairs of rows whose
    difference is within the noise count for neither side.
    """
    from ksana_jax.lab.experiments import papers

    if paper is None:
        return papers.show_papers()
    raise typer.Exit(papers.reproduce(paper, full, out))


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="folders that `ksana run` wrote", show_default=False),
    ],
    out: Annotated[
        Path | None, typer.Option(help="folder for table and figure", show_default="the run's; none for several runs")
    ] = None,
    own_code: OwnCode = False,
) -> None:
    """Redraws the table and figure of a run from its records, or combines several runs in one table.

    Runs that scored different texts are refused, because their numbers are not comparable.
    """
    from ksana_jax.lab.experiments.command import report_and_show

    report_and_show(folders, out, None if own_code else ())


def compare(
    a: Annotated[Path, typer.Argument(help="a folder that `ksana run` wrote, or a recording", show_default=False)],
    b: Annotated[Path, typer.Argument(help="the run or recording to compare with it", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="folder for compare.md and compare.json", show_default="none")
    ] = None,
    as_json: AsJson = False,
    own_code: OwnCode = False,
) -> None:
    """Compares two runs row by row: differences of their trials, and a paired t-test for each number.

    Rows with the nearest settings are paired. Runs that scored different texts are refused. `ksana report A B`
    shows the same runs in one table and figure, without a test.

    For two recordings (`ksana trace --record`), shows the first step where their decisions and blocks differ,
    and which sequences have other tokens.
    """
    from ksana_jax.lab.experiments.command import compare_and_show
    from ksana_jax.lab.recording import is_recording
    from ksana_jax.lab.trace.command import compare_recordings

    if is_recording(a) and is_recording(b):
        return compare_recordings(a, b, out, as_json)
    compare_and_show(a, b, out, as_json, None if own_code else ())


def export(
    folder: Annotated[Path, typer.Argument(help="a folder that `ksana run` wrote", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="a CSV file", show_default="standard output")] = None,
    own_code: OwnCode = False,
) -> None:
    """Prints a run as CSV, one row per finished trial: label, grid, seed, trial id, and every number of its summary."""
    from ksana_jax.core.files import write_atomic
    from ksana_jax.lab.experiments.export import export as make

    text = make(folder, None if own_code else ())
    if out is None:
        print(text, end="")
    else:
        write_atomic(out, text)


def inspect(
    file: Experiment,
    overrides: Overrides = None,
    out: Out = None,
    row: Annotated[int, typer.Option(help="row of the experiment's table to run, from 1; with its first seed")] = 1,
    step: Annotated[
        int | None, typer.Option(help="list the blocks after this step", show_default="the fullest")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows the owners of KV blocks: a picture of the pool over one trial, counts, and a list of blocks."""
    from ksana_jax.lab.experiments.inspection import inspect_and_show

    inspect_and_show(file, overrides or [], out, row, step, as_json)
