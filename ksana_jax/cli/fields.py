"""Options of commands made from fields of dataclasses, and read back. Knows no command."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ksana_jax.core.docstrings import field_meanings


def takes_fields(cls: type, names: str = "", meanings: Mapping[str, str] | None = None) -> Callable:
    """Replaces the parameter `options` of a command by options for fields of a dataclass.

    The command gets a dict of the fields' values as `options`. A tuple is given as texts or numbers separated by
    commas, a field without a plain type as in YAML. The default None is named after "None takes" or "None means" in a
    description.

    Args:
      names: the fields separated by spaces, each as "field", or as "field=option" where the option has another name;
        empty for all.
      meanings: descriptions of fields, by default the class's docstring.
    """
    hints, fields = get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}
    pairs = [name.partition("=") for name in names.split() or fields]
    option_names = {field: option or field for field, _, option in pairs}
    meanings = field_meanings(cls) if meanings is None else meanings
    options = [
        _option(name, fields[field].default, hints[field], meanings[field]) for field, name in option_names.items()
    ]

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            read = {field: _read(name, hints[field], given.pop(name)) for field, name in option_names.items()}
            command(**given, options=read)

        parameters = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            parameters += options if parameter.name == "options" else [parameter]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        with_options.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_options

    return decorated


def _option(name: str, default: Any, hint: Any, meaning: str) -> inspect.Parameter:
    help, *absent = re.split(r"; (?:None|empty) (?:takes|means) ", meaning.removesuffix("."), maxsplit=1)
    settings: dict[str, Any] = {"help": help}
    flag = "--" + name.replace("_", "-")
    if get_origin(hint) is tuple:
        settings["metavar"] = "NAME,..." if get_args(hint)[0] is str else "NUMBER,..."
        hint, default = str | None, ",".join(map(str, default)) or None
    elif _is_yaml(hint):
        hint, settings["metavar"] = str | None, "YAML"
    if default is None:
        settings["show_default"] = absent[0] if absent else False
    flags = [flag] if default is False else []
    annotation = Annotated[hint, typer.Option(*flags, **settings)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _is_yaml(hint: Any) -> bool:
    parts = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return any(part is Any or dict in (part, get_origin(part)) for part in parts)


def _read(name: str, hint: Any, given: Any) -> Any:
    if get_origin(hint) is tuple:
        return _read_tuple(name, given or "", get_args(hint)[0])
    return read_setting(name, given) if _is_yaml(hint) else given


def _read_tuple(name: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    parts = [part.strip() for part in text.split(",")]
    try:
        return tuple(map(kind, filter(None, parts) if kind is str else parts))
    except ValueError:
        example = "256,1024" if kind is int else "0.5,1"
        flag = "--" + name.replace("_", "-")
        raise ValueError(f"{flag} is {text!r}, must be comma-separated numbers such as {example}") from None


def read_setting(name: str, text: str | None) -> Any:
    """Returns the value of a setting that is written as in a YAML file; None if it is not given.

    Raises:
      ConfigError: it is not YAML.
    """
    from ksana_jax.lab.runs.dotted import dotlist

    return None if text is None else dotlist([f"{name}={text}"])[name]
