"""The progress bar of `LLM.generate` on standard error: finished requests, and tokens per second."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ksana_jax.engine.completion import Request


@contextlib.contextmanager
def progress_bar(requests: Sequence[Request]) -> Iterator[Callable[[], None]]:
    """Draws a bar while requests run, and yields the function that updates it."""
    # Slow to import, and rarely used.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    began = time.perf_counter()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(requests), speed="")

        def update() -> None:
            done = [request for request in requests if request.finished]
            tokens = sum(request.metrics.num_output_tokens for request in done)
            speed = f"{tokens / (time.perf_counter() - began):,.0f} tokens/s"
            bar.update(task, completed=len(done), speed=speed)

        yield update
        update()
