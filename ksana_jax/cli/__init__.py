"""The `ksana` command. Commands import their dependencies only when they run, which keeps `ksana --help` fast."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Annotated

import typer

from ksana_jax import __version__
from ksana_jax.cli import (
    aligning,
    bench,
    calibrating,
    chat,
    evaluation,
    fetching,
    groups,
    listing,
    logs,
    machine,
    quantizing,
    routing,
    serving,
    simulating,
    studies,
    text,
    tracing,
)
from ksana_jax.core import processor
from ksana_jax.core.compilation_cache import keep_compiled_steps
from ksana_jax.core.errors import JobError, one_line

app = groups.group(
    "Quality, memory and speed of KV-cache techniques, measured on one engine.",
    name="ksana",
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"ksana {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="log what is loaded, allocated and compiled, with durations")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="print the version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    if verbose:
        logs.show_log()


EXPERIMENTS, MODELS, SERVING, DEBUGGING = "Experiments", "Models", "Serving", "Debugging"
# Panel, command, an example, and the page in docs/.
COMMANDS = (
    (EXPERIMENTS, studies.run, "run quickstart engine.block_size=8 --out runs/small-blocks", "use/experiments"),
    (EXPERIMENTS, studies.reproduce, "reproduce kivi", "reference/commands"),
    (EXPERIMENTS, studies.report, "report runs/quickstart runs/small-blocks --out runs/both", "use/experiments"),
    (EXPERIMENTS, studies.compare, "compare runs/quickstart runs/small-blocks", "use/experiments"),
    (EXPERIMENTS, studies.schema, "schema", "use/experiments"),
    (EXPERIMENTS, evaluation.lm_eval, "lm-eval run --model ksana --model_args pretrained=DIR", "use/evaluation"),
    (MODELS, fetching.fetch, "fetch smollm2", "use/models"),
    (MODELS, text.generate, 'generate smollm2 --prompt "def main("', "use/models"),
    (MODELS, chat.chat, 'chat smollm2 --system "Answer in one sentence."', "use/models"),
    (MODELS, calibrating.calibrate, "calibrate smollm2 --text notes/ --for qfilter", "reference/eviction"),
    (MODELS, quantizing.quantize, "quantize ksana-tiny --to q8_0", "use/models"),
    (SERVING, machine.plan, "plan --model llama-2-7b --device h200 --context 4096", "reference/commands"),
    (SERVING, serving.serve, "serve smollm2 max_num_seqs=8 --port 8001", "use/serving"),
    (SERVING, routing.route, "route --servers 127.0.0.1:8001,127.0.0.1:8002", "use/proxy"),
    (DEBUGGING, machine.doctor, "doctor smollm2", "use/models"),
    (DEBUGGING, aligning.align, "align dtype=f32 dtype=bf16 --model ksana-tiny", "reference/commands"),
)
for panel, command, words, page in COMMANDS:
    app.command(
        cls=groups.ServeCommand if command is serving.serve else groups.Command,
        # Their arguments may belong to another command or program.
        context_settings={"ignore_unknown_options": command in (routing.route, evaluation.lm_eval)},
        rich_help_panel=panel,
        epilog=groups.example(words, page),
    )(command)
# Runs on the other hosts of a job.

app.add_typer(listing.app, name="list", rich_help_panel=EXPERIMENTS)
app.add_typer(simulating.app, name="simulate", rich_help_panel=SERVING)
app.add_typer(tracing.app, name="trace", rich_help_panel=DEBUGGING)
benches = groups.group("Benchmarks the engine on this machine.", cls=bench.BenchGroup)
app.add_typer(benches, name="bench", rich_help_panel=DEBUGGING)

# Options of `ksana` itself that may appear anywhere: after an error, users append --debug to the same command.
ANYWHERE = ("--debug", "--verbose", "-v")


def _warn(message, category, filename, lineno, file=None, line=None) -> None:
    _say("warning", str(message))


def _say(kind: str, message: str) -> None:
    print(f"ksana: {kind}: {one_line(' '.join(message.split()))}", file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    """Runs `ksana`. Invalid input gives one line on stderr and exit code 2, Ctrl-C exit code 130."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        _run(argv)
    except SystemExit as end:
        if end.code == 130:  # typer's status after Ctrl-C
            resumes = "; repeat the command to resume" if argv[:1] == ["run"] else ""
            print(f"ksana: interrupted{resumes}", file=sys.stderr)
        raise


def _run(argv: list[str]) -> None:
    debug = "--debug" in argv
    moved = [a for a in argv if a in ANYWHERE]
    argv = [a for a in argv if a not in ANYWHERE]
    warnings.showwarning = _warn
    # Characters that an encoding lacks are escaped, such as \xe9; input is decoded strictly in any locale.
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace"), (sys.stdin, "strict")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        processor.hide()
        keep_compiled_steps()
        app(moved + argv, prog_name="ksana")
    except (ValueError, OSError, NotImplementedError, FloatingPointError, JobError) as error:
        if debug:
            raise
        _say("error", str(error))
        sys.exit(2)
    except RuntimeError as error:
        if debug or type(error).__name__ != "JaxRuntimeError":
            raise
        _say("error", f"the device refuses: {error}")
        sys.exit(2)
    except ImportError as error:
        if debug:
            raise
        _say("error", f"{error}{_why_missing(error)}")
        sys.exit(2)


def _why_missing(error: ImportError) -> str:
    """Advises on a module that was not found; empty if the error itself does."""
    package = (error.name or "").partition(".")[0]
    places = [*getattr(sys.modules.get(package), "__path__", ())]
    if package == "pallas_kernels" and places:
        return f"; {places[0]} shadows ksana_jax's package {package!r}: remove its folder from PYTHONPATH, or rename it"
    return "" if "pip install" in str(error) else "; is everything installed? (pip install -e .)"
