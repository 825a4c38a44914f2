"""A section's process: imports, waits for its time to come, runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from typing import NoReturn

from experiments.gpu.context import Context
from experiments.gpu.plan import by_name


def run_child(args: argparse.Namespace) -> int:
    """Runs section `args.child` once standard input says for how many seconds; returns the exit status."""
    section = by_name(args.child)
    import_error = None
    try:
        module = importlib.import_module(f"experiments.gpu.sections.{section.module}")
    except Exception as error:  # recorded once the section's time has come
        module, import_error = None, error
    line = sys.stdin.readline()
    if not line.strip():
        return 3  # the driver has exited
    context = Context(
        section.name,
        args.records,
        time.monotonic() + float(line),
        args.tiny,
        args.peer_python,
        args.folder,
        args.careful,
        args.shard,
    )
    if module is None:
        assert import_error is not None
        context.failed("import", import_error)
        return 1
    try:
        module.run(context)
    except Exception as error:
        context.failed(section.name, error)
        _leave(1)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """Ends the process at once: a compiler that is still at work would abort a tidy end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
