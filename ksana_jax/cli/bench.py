"""`ksana bench`: a command for each entry of BENCHES, and for an own benchmark as "package.module:Class", made from its
fields on first use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ksana_jax.cli.fields import takes_fields
from ksana_jax.cli.groups import Command, Group, example
from ksana_jax.cli.options import AsJson
from ksana_jax.lab.bench import BENCHES

Repeats = Annotated[int, typer.Option(help="how often each row is measured, after a warm-up")]
Out = Annotated[
    Path | None, typer.Option(help="folder for records, tables and figure", show_default="nothing is written")
]


class Benches(Mapping):
    """The commands of `ksana bench` by name. A benchmark is imported when its command is looked up, not before."""

    def __init__(self):
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            if name not in BENCHES and ":" not in name:
                raise KeyError(name)
            self._made[name] = _command(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(BENCHES)

    def __len__(self) -> int:
        return len(BENCHES)


class BenchGroup(Group):
    """The command group of BENCHES."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.commands: Any = Benches()


def _command(name: str) -> Any:
    from ksana_jax.core.plugins import resolve

    kind = resolve(name, BENCHES, "bench")
    meanings = {field.name: field.metadata["help"] for field in dataclasses.fields(kind) if "help" in field.metadata}

    def bench(*, options: dict[str, Any], repeats: Repeats = kind.REPEATS, out: Out = None, as_json: AsJson = False):
        from ksana_jax.lab.bench.command import run_and_show

        run_and_show(kind(**options), repeats=repeats, out=out, as_json=as_json)

    bench.__doc__ = kind.__doc__
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command(name, cls=Command, epilog=example(f"bench {name}", "use/benchmarks"))(
        takes_fields(kind, " ".join(meanings), meanings)(bench)
    )
    return typer.main.get_command(app)
