"""`ksana list`: what ships with the package, and the settings of each task."""

from __future__ import annotations

from typing import Annotated

import typer

from ksana_jax.cli.groups import Command, group

app = group("Lists what ships with ksana: experiments, papers, models, tasks, methods.")


@app.command(cls=Command)
def experiments() -> None:
    """Lists the experiments that `ksana run NAME` runs, with their titles."""
    from ksana_jax.core.shipped import experiments

    for name, path in experiments().items():
        title = next(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("title: "))
        print(f"{name:24} {title.removeprefix('title: ')}")


@app.command(cls=Command)
def papers() -> None:
    """Lists the papers that `ksana reproduce NAME` repeats, with their claims."""
    from ksana_jax.lab.runs.papers import show_papers

    show_papers()


@app.command(cls=Command)
def models() -> None:
    """Lists model families by the model_type of their config.json, and what works with each, as Markdown."""
    from ksana_jax.engine.family_table import table

    print(table())


@app.command(cls=Command)
def tasks(
    name: Annotated[
        str | None,
        typer.Argument(
            help="show the settings of this task, or of your own as package.module:Class", show_default=False
        ),
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="print the reference of experiment files, docs/reference/yaml.md")
    ] = False,
) -> None:
    """Lists the tasks, that is, what experiments can measure."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ksana_jax.lab.runs.reference import fields_of, markdown, summary
    from ksana_jax.lab.runs.tasks import TASKS, task_named

    if as_markdown or name is None:
        print(markdown() if as_markdown else "\n".join([*TASKS, ""]), end="")
        return
    console = Console(highlight=False)
    console.print(f"[bold]{escape(name)}[/bold]  {escape(summary(name))}")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for field in fields_of(task_named(name).Settings):
        table.add_row(*map(escape, (f"  settings.{field.name}", field.default, field.meaning)))
    console.print(table)


@app.command(cls=Command)
def methods() -> None:
    """Lists the built-in methods by the setting that selects one."""
    import importlib

    from ksana_jax.methods import EXTENSION_POINTS

    for point in EXTENSION_POINTS:
        module, _, registry = point.registry.partition(":")
        print(f"{point.setting}: {', '.join(getattr(importlib.import_module(module), registry))}")
