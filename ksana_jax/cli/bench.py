"""`ksana bench`: one command for each entry of BENCHES, made of its fields when it is first asked for."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ksana_jax.cli.groups import Command, Group
from ksana_jax.cli.options import AsJson, read_setting
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
            self._made[name] = _command(name, BENCHES[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(BENCHES)

    def __len__(self) -> int:
        return len(BENCHES)


class BenchGroup(Group):
    """The group whose commands are those of BENCHES."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.commands: Any = Benches()


def _command(name: str, spec: str) -> Any:
    from ksana_jax.core.plugins import resolve

    kind = resolve(name, BENCHES, "bench")
    hints = get_type_hints(kind)
    fields = [field for field in dataclasses.fields(kind) if "help" in field.metadata]

    def bench(repeats: Repeats = kind.REPEATS, out: Out = None, as_json: AsJson = False, **given: Any) -> None:
        from ksana_jax.lab.bench.command import run_and_show

        options = {field.name: _read(field.name, hints[field.name], given[field.name]) for field in fields}
        run_and_show(kind(**options), repeats=repeats, out=out, as_json=as_json)

    common = [p for p in inspect.signature(bench, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = [_parameter(field, hints[field.name]) for field in fields]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *common)]
    bench.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    bench.__annotations__ = {p.name: p.annotation for p in parameters}
    bench.__doc__ = kind.__doc__
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command(name, cls=Command)(bench)
    return typer.main.get_command(app)


def _parameter(field: dataclasses.Field, hint: Any) -> inspect.Parameter:
    """Returns a field as an option: numbers or names separated by commas if it is a tuple, YAML if it is a mapping."""
    help: str = field.metadata["help"]
    default: Any = field.default
    settings: dict[str, Any] = {}
    if get_origin(hint) is tuple:
        names = get_args(hint)[0] is str
        hint, default, settings = str, ",".join(map(str, default)), {"metavar": "NAMES" if names else "NUMBERS"}
        settings |= {"show_default": bool(default)}
    elif _holds(hint, dict):
        hint, settings = str | None, {"metavar": "YAML"}
    if default is None:
        settings["show_default"] = field.metadata.get("none", False)
    annotation = Annotated[hint, typer.Option(help=help, **settings)]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _holds(hint: Any, kind: type) -> bool:
    parts = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return any(part is kind or get_origin(part) is kind for part in parts)


def _read(name: str, hint: Any, given: Any) -> Any:
    if get_origin(hint) is tuple:
        return _numbers(name, given, get_args(hint)[0])
    return read_setting(name, given) if _holds(hint, dict) else given


def _numbers(name: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part.strip()) for part in text.split(",")) if text or kind is not str else ()
    except ValueError:
        example = "256,1024" if kind is int else "0.5,1"
        flag = "--" + name.replace("_", "-")
        raise ValueError(f"{flag} is {text!r}, must be comma-separated numbers such as {example}") from None
