"""Command classes that add -h, print flags without `<bool>`, and accept former names of options."""

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


class ServeCommand(Command):
    """A command whose settings may be given as flags of `vllm serve`, see `vllm_flags`."""

    def parse_args(self, ctx, args):
        from ksana_jax.cli.vllm_flags import as_settings

        own = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        return super().parse_args(ctx, list(as_settings(args, own)))


class Group(_FlagsWithoutType, TyperGroup):
    """A group of commands, such as `ksana bench`."""


# Former names of options; they still work but are not in any help text.
FORMER_NAMES = {"sinks": "num-sinks"}


def group(help: str, cls: type[Group] = Group, **settings) -> typer.Typer:
    """Creates an empty command group, which prints its help when no command is given."""
    names = {
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: FORMER_NAMES.get(name, name),
    }
    return typer.Typer(cls=cls, help=help, context_settings=names, no_args_is_help=True, **settings)
