"""Command classes that add -h and print flags without `<bool>`."""

from __future__ import annotations

import dataclasses

import typer
from typer.core import TyperCommand, TyperGroup

# click's, or of the copy of click that newer versions of typer have.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


class _FlagsWithoutType:
    def get_params(self, ctx):
        params = super().get_params(ctx)  # pyright: ignore[reportAttributeAccessIssue]  the command's, below
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_FlagsWithoutType, TyperCommand):
    """A command of `ksana`."""


class ServeCommand(Command):
    """`ksana serve`, whose errors say how a flag of `vllm serve` is written here."""

    def parse_args(self, ctx, args):
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            if type(error).__name__ == "NoSuchOption":
                error.message += _as_setting(error.option_name)  # pyright: ignore[reportAttributeAccessIssue]
            raise


def _as_setting(flag: str) -> str:
    from ksana_jax.core.config import EngineConfig
    from ksana_jax.core.plugins import nearest
    from ksana_jax.core.vllm_names import PAGE, RENAMED

    settings = [*RENAMED, *(field.name for field in dataclasses.fields(EngineConfig))]
    close = nearest(flag.lstrip("-").replace("-", "_"), settings)
    hint = f"; the nearest setting is {close}=VALUE" if close else ""
    return f"{hint}; see {PAGE}"


def example(words: str, page: str = "reference/commands") -> str:
    """Returns the end of a command's help: a command line, and the page in docs/ that explains it."""
    return f"Example: ksana {words}\n\nDocs: docs/{page}.md"


class Group(_FlagsWithoutType, TyperGroup):
    """A group of commands, such as `ksana bench`."""


def group(help: str, cls: type[Group] = Group, **settings) -> typer.Typer:
    """Creates an empty command group, which prints its help when no command is given."""
    names = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(cls=cls, help=help, context_settings=names, no_args_is_help=True, **settings)
