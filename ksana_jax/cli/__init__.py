"""The `ksana` command. Each command imports what it needs when it runs, so that `ksana --help` answers at once."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from ksana_jax.cli import machine, studies, text, training
from ksana_jax.compilation_cache import keep_compiled_steps

app = typer.Typer(
    name="ksana",
    help="Quality, memory and speed of KV-cache techniques, measured on one engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    pass


COMMANDS = (
    studies.run,
    studies.report,
    studies.inspect,
    text.generate,
    machine.plan,
    training.train,
    machine.doctor,
)
for command in COMMANDS:
    app.command()(command)

bench = typer.Typer(help="Times of the engine on this machine.", no_args_is_help=True)
bench.command("host")(machine.bench_host)
bench.command("throughput")(machine.bench_throughput)
app.add_typer(bench, name="bench")

kernels = typer.Typer(help="The kernels, proved on this machine.", no_args_is_help=True)
kernels.command("check")(machine.kernels_check)
app.add_typer(kernels, name="kernels")


def _warn(message, category, filename, lineno, file=None, line=None) -> None:
    print(f"ksana: warning: {message}", file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    """Entry point: an error of the user is one line on stderr and exit code 2."""
    argv = sys.argv[1:] if argv is None else argv
    # Wherever it stands: `ksana run x.yaml --debug` is what one types after an error.
    debug = "--debug" in argv
    argv = [a for a in argv if a != "--debug"]
    warnings.showwarning = _warn
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    keep_compiled_steps(Path(cache_home) / "ksana_jax" / "compiled")
    try:
        app(["--debug"] * debug + argv, prog_name="ksana")
    except (ValueError, OSError, NotImplementedError) as error:
        if debug:
            raise
        print(f"ksana: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except ImportError as error:
        if debug:
            raise
        print(f"ksana: error: {error}; is everything installed? (pip install -e .)", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        # typer makes this of Ctrl-C.
        if end.code == 130:
            resumes = "; the same command goes on from here" if argv[0] in ("run", "train") else ""
            print(f"ksana: interrupted{resumes}", file=sys.stderr)
        raise
