"""How commands print their help, -h besides --help and no `<bool>` behind a flag, and former names of options."""

from __future__ import annotations

import typer
from typer.core import TyperCommand, TyperGroup


class _FlagsWithoutType:
    def get_params(self, ctx):
        params = super().get_params(ctx)  # pyright: ignore[reportAttributeAccessIssue]  the command's, below
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_FlagsWithoutType, TyperCommand):
    """A command of `ksana`."""


class Group(_FlagsWithoutType, TyperGroup):
    """A group of commands, such as `ksana bench`."""


# Options that had another name once; it still works and is in no help.
FORMER_NAMES = {"sinks": "num-sinks"}


def group(help: str, **settings) -> typer.Typer:
    """An empty group; its help is printed when no command is given."""
    names = {
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: FORMER_NAMES.get(name, name),
    }
    return typer.Typer(cls=Group, help=help, context_settings=names, no_args_is_help=True, **settings)
