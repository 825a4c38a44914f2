"""`ksana tasks`: lists the tasks of experiments, and the keys of experiment files."""

from __future__ import annotations

from typing import Annotated

import typer


def tasks(
    name: Annotated[
        str | None, typer.Argument(help="a task, or package.module:Class of your own", show_default="all tasks")
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="print the reference of experiment files, docs/reference/yaml.md")
    ] = False,
) -> None:
    """Lists what experiments can measure, with the settings of each task."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ksana_jax.lab.experiments.reference import fields_of, markdown, summary
    from ksana_jax.lab.experiments.tasks import TASKS, task_named

    if as_markdown:
        print(markdown(), end="")
        return
    console = Console(highlight=False)
    for task in [name] if name else TASKS:
        console.print(f"[bold]{escape(task)}[/bold]  {escape(summary(task))}")
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        for field in fields_of(task_named(task).Settings):
            table.add_row(*map(escape, (f"  settings.{field.name}", field.default, field.meaning)))
        console.print(table)
