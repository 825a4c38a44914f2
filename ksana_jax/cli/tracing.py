"""`ksana trace`: records what engines do, repeats it, and shows the owners of KV blocks and why prompts missed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ksana_jax.cli.groups import Command, Group, example, group
from ksana_jax.cli.options import AsJson, Experiment, Out, Overrides, OwnCode


class Trace(Group):
    """A group whose first argument may be what to trace instead of a command."""

    def parse_args(self, ctx, args):
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = group(
    "Traces an experiment or a benchmark, replays a recording, shows the owners of KV blocks, or why prompts missed "
    "the prefix cache. `ksana trace X` is short for `ksana trace run X`.",
    cls=Trace,
)


# Its arguments may belong to another command.
@app.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True},
    epilog=example("trace run quickstart --out runs/trace"),
)
def run(
    context: typer.Context,
    what: Annotated[
        list[str],
        typer.Argument(
            help="an experiment with its overrides, as `ksana run` takes them; or a command with its options, such as "
            "bench throughput --requests 8",
            show_default=False,
            metavar="EXPERIMENT...",
        ),
    ],
    out: Annotated[Path, typer.Option(help="output folder; new or empty", show_default=False)],
    profile_steps: Annotated[
        int, typer.Option(help="steps that run under jax's profiler, after the first that compiles nothing; 0: none")
    ] = 64,
    record: Annotated[
        bool,
        typer.Option("--record", help="also record requests, decisions, blocks and tokens, for `ksana trace replay`"),
    ] = False,
) -> None:
    """Traces an experiment or a benchmark: a page, a timeline for Perfetto, HLO, costs, a profile.

    Every engine that the command builds is traced. Results of an experiment are in the folder run.
    """
    from rich.console import Console
    from rich.markup import escape

    from ksana_jax.core import checks
    from ksana_jax.lab.trace.bundle import check_new, tracing
    from ksana_jax.lab.trace.command import command_line

    checks.require(checks.integer("--profile-steps", profile_steps, 0))
    check_new(out)
    root = context.find_root()
    words = ["--debug"] * root.params["debug"]
    words += command_line(what, list(getattr(root.command, "commands", {})), out)
    with tracing(out, command=f"ksana {' '.join(what)}", profile_steps=profile_steps, record=record) as seen:
        code = root.command.main(words, prog_name="ksana", standalone_mode=False)
    if not seen.recorders:
        raise ValueError(f"ksana {' '.join(what)} built no engine, so there is nothing to trace")
    count = len(seen.recorders)
    folders = ", ".join(f"engine-{number}" for number in range(1, min(count, 3) + 1)) + ", ..." * (count > 3)
    Console(highlight=False).print(f"{escape(str(out))}: index.html, timeline.json, trace.json, functions, {folders}")
    raise typer.Exit(code or 0)


@app.command(cls=Command, epilog=example("trace replay runs/trace policy=shortest_first --out runs/shortest"))
def replay(
    recording: Annotated[Path, typer.Argument(help="a recording, or a folder with one", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="settings of the engine to change, such as policy=shortest_first", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for the replay's own recording; new or empty", show_default="none")
    ] = None,
    as_json: AsJson = False,
    own_code: OwnCode = False,
) -> None:
    """Replays a recording of `ksana trace run --record` step by step, and reports the first difference.

    The same requests enter before the same steps; decisions, blocks and tokens are compared. Without overrides a
    difference ends the replay with exit code 1; with them, it continues to the end. Folders, devices and hosts that the
    recording names are left out.
    """
    from ksana_jax.lab.trace.command import replay_and_show

    raise typer.Exit(replay_and_show(recording, overrides or [], out, as_json, own_code))


@app.command(cls=Command, epilog=example("trace pool quickstart --row 2 --step 5"))
def pool(
    file: Experiment,
    overrides: Overrides = None,
    out: Out = None,
    row: Annotated[int, typer.Option(help="row of the experiment's table to run, from 1; with its first seed")] = 1,
    step: Annotated[
        int | None, typer.Option(help="list the blocks after this step", show_default="the fullest")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows the owners of KV blocks over one trial: a picture of the pool, counts, a list of blocks."""
    from ksana_jax.lab.runs.inspection import inspect_and_show

    inspect_and_show(file, overrides or [], out, row, step, as_json)


@app.command(cls=Command, epilog=example("trace misses serve.log", "use/serving"))
def misses(
    log: Annotated[
        Path,
        typer.Argument(help="the log of `ksana -v serve MODEL 2> FILE`, or a recording", show_default=False),
    ],
    as_json: AsJson = False,
) -> None:
    """Tabulates why prompts missed the prefix cache: causes, and positions at which prompts differ, with both texts."""
    from ksana_jax.lab.trace.misses import show_misses

    show_misses(log, as_json)
