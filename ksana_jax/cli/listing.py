"""`ksana list`: what ships with the package, and the settings of each task."""

from __future__ import annotations

from typing import Annotated

import typer

from ksana_jax.cli.groups import Command, example, group

app = group("Lists what ships with ksana: experiments, papers, models, tasks, methods.")


@app.command(cls=Command, epilog=example("list experiments"))
def experiments() -> None:
    """Lists the experiments that `ksana run NAME` runs, with their titles."""
    from ksana_jax.core.shipped import experiments

    for name, path in experiments().items():
        title = next(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("title: "))
        print(f"{name:24} {title.removeprefix('title: ')}")


@app.command(cls=Command, epilog=example("list papers"))
def papers() -> None:
    """Lists the papers that `ksana reproduce NAME` repeats, with their claims."""
    from ksana_jax.lab.runs.papers import show_papers

    show_papers()


@app.command(cls=Command, epilog=example("list models"))
def models(
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="print the table of model families, of docs/reference/models.md")
    ] = False,
) -> None:
    """Lists the models that ship with the package, those without weights too, and those that `ksana fetch` gets."""
    from ksana_jax.core.shipped import model_names
    from ksana_jax.core.sources.catalogue import FETCHABLE, fetched
    from ksana_jax.lab.runs.models import model_config

    if as_markdown:
        from ksana_jax.engine.family_table import table

        return print(table())
    for name in model_names():
        shape = model_config(name)
        print(f"{name:24} {shape.family}, {shape.num_layers} layers, a context of {shape.max_position:,} tokens")
    for name, wanted in FETCHABLE.items():
        if wanted.is_model:
            print(f"{name:24} {wanted.use}{'' if fetched(name) else f' (not fetched: ksana fetch {name})'}")


@app.command(cls=Command, epilog=example("list tasks perplexity"))
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

    from ksana_jax.lab.runs.reference import fields_of, first_sentence, markdown, summary
    from ksana_jax.lab.runs.tasks import TASKS, task_named

    if as_markdown or name is None:
        lines = (f"{task:12} {first_sentence(summary(type(task_named(task))))}\n" for task in TASKS)
        print(markdown() if as_markdown else "".join(lines), end="")
        return
    console = Console(highlight=False)
    console.print(f"[bold]{escape(name)}[/bold]  {escape(summary(type(task_named(name))))}")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for field in fields_of(task_named(name).Settings):
        table.add_row(*map(escape, (f"  settings.{field.name}", field.default, field.meaning)))
    console.print(table)


@app.command(cls=Command, epilog=example("list methods"))
def methods() -> None:
    """Lists the built-in methods with the setting that selects each."""
    import importlib

    from ksana_jax.core.plugins import resolve
    from ksana_jax.lab.runs.reference import first_sentence, summary
    from ksana_jax.methods import EXTENSION_POINTS

    for point in EXTENSION_POINTS:
        module, _, registry = point.registry.partition(":")
        known = getattr(importlib.import_module(module), registry)
        alike: dict[str, list[str]] = {}  # kivi4, kivi3, kivi2
        for name in known:
            alike.setdefault(first_sentence(summary(resolve(name, known, point.setting))), []).append(name)
        for meaning, names in alike.items():
            print(f"{point.setting:22} {', '.join(names):26} {meaning}")
