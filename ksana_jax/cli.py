"""The `ksana` command. Imports what a command needs when it runs, so that `ksana --help` answers at once."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from ksana_jax.compilation_cache import keep_compiled_steps

app = typer.Typer(
    name="ksana",
    help="Quality, memory and speed of KV-cache techniques, measured on one engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Times of the engine on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
kernels = typer.Typer(help="The kernels, proved on this machine.", no_args_is_help=True)
app.add_typer(kernels, name="kernels")

Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value, dotted: engine.block_size=8", show_default=False)
]


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    pass


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="the experiment, a YAML file", show_default=False)],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="output folder  [default: runs/NAME]", show_default=False)] = None,
    shard: Annotated[str, typer.Option(help="k/n: the k-th of n parts, for job arrays")] = "1/1",
) -> None:
    """Runs an experiment, or goes on with one that was interrupted; prints its table and writes its figure."""
    from experiments.command import run_and_report

    raise typer.Exit(run_and_report(file, overrides or [], out, shard, debug=_debugging()))


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="a folder that `ksana run` wrote", show_default=False)]) -> None:
    """Makes table and figure of a run again from its records."""
    from experiments.command import show
    from experiments.report import report as make

    show(make(folder), folder)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="the experiment, a YAML file", show_default=False)],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="output folder  [default: runs/NAME]", show_default=False)] = None,
    row: Annotated[int, typer.Option(help="which row of the experiment's table, from 1; its first seed is run")] = 1,
    step: Annotated[
        int | None, typer.Option(help="list the blocks after this step  [default: a fullest]", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="end with one line of JSON")] = False,
) -> None:
    """Shows where KV blocks are and whose they are: a picture of the pool over one trial, numbers, a list of blocks."""
    from experiments.inspection import inspect_and_show

    inspect_and_show(file, overrides or [], out, row, step, as_json)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="a Hugging Face directory, or ksana-tiny")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="text to continue", show_default=False)],
    max_tokens: Annotated[int, typer.Option(help="most tokens of output")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token")] = 0.8,
    top_p: Annotated[float, typer.Option(help="smallest set of tokens of that probability")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same text", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="f32 or bf16")] = "f32",
    window: Annotated[int | None, typer.Option(help="attention window in tokens", show_default=False)] = None,
    sinks: Annotated[int, typer.Option(help="sink tokens at cache positions, with --window")] = 0,
    max_model_len: Annotated[
        int | None, typer.Option(help="most tokens, prompt and output", show_default=False)
    ] = None,
) -> None:
    """Continues a prompt, text appearing as it is made."""
    from ksana_jax import LLM, AttentionPattern, SamplingParams

    if sinks and window is None:
        raise ValueError(f"--sinks {sinks} needs --window")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    pattern = None
    if window is not None:
        pattern = AttentionPattern(window=window, num_sinks=sinks, sink_position="cache" if sinks else "absolute")
    llm = LLM(model, dtype=dtype, max_num_seqs=1, max_model_len=max_model_len, pattern=pattern)
    shown = 0
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
    sys.stdout.write("\n")


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="a model directory, a config.json, or ksana-tiny", show_default=False)],
    device: Annotated[str, typer.Option(help="h200, h100, a100-80g, a100-40g, v100-32g, ascend-910b, cpu, or 24GiB")],
    dtype: Annotated[str, typer.Option(help="of the weights: f32 or bf16")] = "bf16",
    batch: Annotated[int | None, typer.Option(help="requests at once  [default: the most]", show_default=False)] = None,
    context: Annotated[
        int | None, typer.Option(help="tokens of each request  [default: the model's]", show_default=False)
    ] = None,
    window: Annotated[int | None, typer.Option(help="attention window in tokens", show_default=False)] = None,
    num_sinks: Annotated[int, typer.Option(help="sink tokens, with --window")] = 0,
    kv_dtype: Annotated[
        str | None, typer.Option(help="of keys and values: f32, bf16, int8  [default: --dtype]", show_default=False)
    ] = None,
    embedding_device: Annotated[str, typer.Option(help="device or host, where the embedding rests")] = "device",
    prefix_share: Annotated[float, typer.Option(help="part of each text that all requests have in common")] = 0.0,
    memory_fraction: Annotated[float, typer.Option(help="part of the device to fill")] = 0.9,
    buckets: Annotated[bool, typer.Option("--buckets", help="list what each bucket takes; compiles them all")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="end with one line of JSON")] = False,
) -> None:
    """Says where a device's memory goes for a model, and the largest batch, context and window that fit."""
    from ksana_jax.planner.report import main as show

    show(
        model, device, buckets=buckets, as_json=as_json, dtype=dtype, batch=batch, context=context, window=window,
        num_sinks=num_sinks, kv_dtype=kv_dtype, embedding_device=embedding_device, prefix_share=prefix_share,
        memory_fraction=memory_fraction,
    )  # fmt: skip


@app.command()
def train(
    file: Annotated[Path, typer.Argument(help="the training configuration, a YAML file", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Trains a model, or goes on with a training that was interrupted."""
    from ksana_jax.training import train as train_model

    train_model(str(file), overrides or [])


@app.command()
def doctor() -> None:
    """Says what this machine has, which implementations would be used, and why not the others."""
    from rich.console import Console
    from rich.markup import escape

    from experiments.environment import environment
    from ksana_jax.ops.implementations import explain

    console, found = Console(highlight=False), environment()
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    console.print(
        f"device     {found['num_devices']} x {escape(found['device'])} ({found['backend']}), {found['cores']} cores"
    )
    console.print(f"system     {found['platform']}")
    console.print(f"python     {found['python']}")
    console.print(f"packages   {packages}")
    console.print(f"XLA_FLAGS  {escape(found['xla_flags']) or '(none)'}")
    console.print("ragged paged attention:")
    for name, chosen, reason in explain():
        console.print(f"  {'[green]used[/green]    ' if chosen else 'not used'}  {escape(name)}: {escape(reason)}")


@bench.command("host")
def bench_host(
    rows: Annotated[str, typer.Option(help="running sequences, a list of numbers")] = "256,1024",
    steps: Annotated[int, typer.Option(help="steps, of which the median is taken")] = 200,
    context: Annotated[int, typer.Option(help="tokens of each sequence")] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="end with one line of JSON")] = False,
) -> None:
    """CPU time of the host loop for a decode step, with a device that takes none."""
    counts = [part.strip() for part in rows.split(",")]
    if not all(part.isdecimal() for part in counts):
        raise ValueError(f"--rows {rows!r} is not a list of numbers such as 256,1024")
    from ksana_jax.bench.host import main as measure

    measure([int(part) for part in counts], steps=steps, context=context, as_json=as_json)


@bench.command("throughput")
def bench_throughput(
    model: Annotated[str, typer.Option(help="a Hugging Face directory, or ksana-tiny")] = "ksana-tiny",
    dtype: Annotated[str, typer.Option(help="f32 or bf16")] = "f32",
    requests: Annotated[int, typer.Option(help="requests, all there from the beginning")] = 32,
    seed: Annotated[int, typer.Option(help="draws lengths and prompts")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="end with one line of JSON")] = False,
) -> None:
    """Output tokens a second: prompts of 32 to 256 tokens, outputs of 16 to 128, greedy."""
    from ksana_jax.bench.throughput import main as measure

    measure(model, dtype=dtype, num_requests=requests, seed=seed, as_json=as_json)


@kernels.command("check")
def kernels_check(
    target: Annotated[str, typer.Option(help="h200, h100, a100 (Triton kernels only) or v5e, a TPU")] = "h200",
    only: Annotated[str, typer.Option(help="regular expression: of cases with it in their line", metavar="REGEX")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="end with one line of JSON")] = False,
) -> None:
    """Compiles kernels and whole steps for a GPU, on a machine without one: registers, spills, memory, pool copies."""
    from ksana_jax.kernel_check import main as check

    raise typer.Exit(check(target, only=only, as_json=as_json))


_debug = False


def _debugging() -> bool:
    return _debug


def _warn(message, category, filename, lineno, file=None, line=None) -> None:
    print(f"ksana: warning: {message}", file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    """Entry point: an error of the user is one line on stderr and exit code 2."""
    global _debug
    argv = sys.argv[1:] if argv is None else argv
    # Wherever it stands: `ksana run x.yaml --debug` is what one types after an error.
    _debug = "--debug" in argv
    warnings.showwarning = _warn
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    keep_compiled_steps(Path(cache_home) / "ksana_jax" / "compiled")
    try:
        app([a for a in argv if a != "--debug"], prog_name="ksana")
    except (ValueError, OSError, NotImplementedError) as error:
        if _debug:
            raise
        print(f"ksana: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except ImportError as error:
        if _debug:
            raise
        print(f"ksana: error: {error}; is everything installed? (pip install -e .)", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        # typer makes this of Ctrl-C.
        if end.code == 130:
            resumes = "; the same command goes on from here" if argv[0] in ("run", "train") else ""
            print(f"ksana: interrupted{resumes}", file=sys.stderr)
        raise
