"""`ksana simulate`: engines under a virtual clock, and their cost models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ksana_jax.cli import studies
from ksana_jax.cli.groups import Command, example, group
from ksana_jax.cli.options import Experiment, Out, Overrides
from ksana_jax.core.sources import MODEL_HELP

Settings = Annotated[
    list[str] | None, typer.Argument(help="settings of the engine, such as max_num_seqs=64", show_default=False)
]


app = group("Simulates engines: the real scheduler and KV memory, with modelled step times.")


@app.command(cls=Command, epilog=example("simulate capacity capacity --slo ttft_p99=2", "use/simulator"))
def capacity(
    context: typer.Context,
    file: Experiment,
    overrides: Overrides = None,
    slo: Annotated[
        str | None,
        typer.Option(help="objectives, such as ttft_p99=2,tpot_p99=0.1, in seconds", show_default="those of the file"),
    ] = None,
    out: Out = None,
) -> None:
    """Searches the largest rate that keeps objectives: an experiment of task capacity."""
    more = [] if slo is None else [f"settings.slo={{asked: '{slo}'}}"]
    studies.run(context, file, [*(overrides or []), *more], out)


@app.command(cls=Command, epilog=example("simulate record ksana-tiny max_num_seqs=16 -o steps.jsonl", "use/simulator"))
def record(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    settings: Settings = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="file for the steps")] = Path("steps.jsonl"),
    seconds: Annotated[float, typer.Option(help="how long the engine runs, after compiling")] = 60.0,
    max_prompt: Annotated[int, typer.Option(help="longest prompt, in tokens")] = 512,
    max_output: Annotated[int, typer.Option(help="longest answer, in tokens")] = 128,
) -> None:
    """Runs an engine through steps of many sizes and records their times."""
    import os
    import time

    from ksana_jax.core import checks
    from ksana_jax.core.files import require_folder
    from ksana_jax.lab import recording
    from ksana_jax.lab.runs.dotted import dotlist
    from ksana_jax.lab.runs.environment import environment
    from ksana_jax.lab.simulator.measuring import exercise, make_engine
    from ksana_jax.lab.simulator.move_times import measure_moves
    from ksana_jax.lab.trace.header import header

    checks.require(
        checks.number("--seconds", seconds, above=0, high=24 * 3600),
        checks.integer("--max-prompt", max_prompt),
        checks.integer("--max-output", max_output),
    )
    require_folder("--out", out.parent)
    if out.is_dir():
        raise ValueError(f"--out is {str(out)!r}, must be a file, not a folder")
    engine = make_engine(model, **dotlist(settings or []))
    if (longest := max_prompt + max_output) > engine.max_model_len:
        raise ValueError(
            f"--max-prompt {max_prompt:,} and --max-output {max_output:,} are {longest:,} tokens, max_model_len is "
            f"{engine.max_model_len:,}"
        )
    engine.records.clear()
    exercise(engine, seconds, max_prompt=max_prompt, max_output=max_output)
    records, moves = list(engine.records), measure_moves(engine)
    about = header(engine, decisions=False) | {"environment": environment(), "load_average": os.getloadavg()}
    about |= {"recorded": time.time(), "moves": moves}
    recording.write(out, about, map(recording.plain_record, records))
    print(f"{out}: {len(records):,} steps, {len(moves):,} moves of blocks")


@app.command(cls=Command, epilog=example("simulate fit steps.jsonl -o cost.json", "use/simulator"))
def fit(
    steps: Annotated[
        Path, typer.Argument(help="a recording of `ksana simulate record` or `ksana trace`", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="file for the costs")] = Path("cost.json"),
    method: Annotated[
        str, typer.Option(help="affine: by size, corrected for each shape; table: a mean for each shape")
    ] = "affine",
) -> None:
    """Fits costs to recorded steps; prints the errors on a fifth of them that is held out."""
    import dataclasses
    import json

    from ksana_jax.core import checks
    from ksana_jax.core.errors import ConfigError
    from ksana_jax.core.files import write_atomic
    from ksana_jax.lab.recording import read
    from ksana_jax.lab.simulator.fit import fit as fitted
    from ksana_jax.lab.simulator.move_cost import TransferLink

    checks.require(checks.one_of("--method", method, ("affine", "table")), error=ConfigError)
    made = read(steps)
    cost = fitted(made.records(), made.header, method=method)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, json.dumps(cost.plain(), indent=1) + "\n")
    for phase, errors in cost.provenance["held_out"].items():
        print(
            f"{phase}: {errors['num_steps']:,} steps held out, mean absolute error {errors['mape']:.1%}, "
            f"error of their sum {errors['error_of_the_sum']:+.1%}"
        )
    print(f"host: {cost.host.step_s * 1e6:,.0f} us a step and {cost.host.row_s * 1e6:,.2f} us a row")
    print(f"moves: {cost.provenance['moves']}")
    for way, link in dataclasses.asdict(cost.move).items():
        if link != dataclasses.asdict(TransferLink()):
            rate = "any rate" if link["bytes_per_s"] is None else f"{link['bytes_per_s'] / 1e9:,.2f} GB/s"
            print(f"  {way}: {link['fixed_s'] * 1e6:,.0f} us and {rate}")
    print(f"{out}: {len(cost.shapes)} shapes")
