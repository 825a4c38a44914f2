"""`ksana plan` and `ksana doctor`: capacity and environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ksana_jax.cli.fields import read_setting, takes_fields
from ksana_jax.cli.options import AsJson
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.sources import MODEL_HELP
from ksana_jax.runner.planner.request import PlanRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from ksana_jax.ops.table import OperatorRow


@takes_fields(
    PlanRequest,
    "dtype kv_cache_dtype=kv_dtype quantization kv_eviction batch context window num_sinks embedding_device "
    "tensor_parallel_size prefix_share memory_fraction",
)
def plan(
    model: Annotated[
        list[str],
        typer.Option(help=f"{MODEL_HELP}; several times for models that share the device", show_default=False),
    ],
    device: Annotated[str, typer.Option(help="h200, h100, a100-80g, a100-40g, v100-32g, ascend-910b, cpu, or 24GiB")],
    kv_full_precision_layers: Annotated[
        str | None, typer.Option(help="layers that are stored in the dtype of weights, such as '[0]'", metavar="YAML")
    ] = None,
    *,
    options: dict[str, Any],
    buckets: Annotated[
        bool, typer.Option("--buckets", help="list the memory of each compiled step; compiles all of them")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Predicts a model's device memory, and the largest batch, context and window that fit.

    For several models: whether all fit awake, or one while the others sleep.
    """
    from ksana_jax.runner.planner import report, several

    options["kv_full_precision_layers"] = read_setting("kv_full_precision_layers", kv_full_precision_layers) or ()
    if len(model) == 1:
        return report.main(model[0], device, buckets=buckets, as_json=as_json, **options)
    if buckets:
        raise ConfigError(f"--buckets is of one model, {len(model)} are given")
    several.main(model, device, as_json=as_json, **options)


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"print what decides the answers of a model, and the file that says so: {MODEL_HELP}",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="try out what a device can do: a platform such as npu or cpu, or as in YAML: '{platform: npu, plugin: "
            "PATH.so}'; each group of checks in a process of its own",
            show_default=False,
            metavar="YAML",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows devices, versions, and the implementations of each operator.

    For each implementation: what it needs, and whether it is used. Also whether numerics: invariant is available, and
    what operators.prefer: agreement chooses. With a model, shows the facts in its files instead.
    """
    import json

    if model is not None:
        if device is not None:
            raise ConfigError("doctor takes a model or --device")
        return _print_model(model, as_json)
    if device is not None:
        from ksana_jax.lab.device_check.report import show

        raise typer.Exit(show(read_setting("device", device), as_json))

    from rich.console import Console
    from rich.markup import escape

    from ksana_jax.core.processor import hidden
    from ksana_jax.engine.verdict import verdicts_here
    from ksana_jax.lab.runs.environment import environment
    from ksana_jax.native.build import instructions
    from ksana_jax.ops.implementations import EXAMPLE, example_needs
    from ksana_jax.ops.invariant import why_not_invariant
    from ksana_jax.ops.table import operator_table
    from ksana_jax.runner.store import entries, store_folder, why_off

    console, found, needs, known = Console(highlight=False), environment(), example_needs(), verdicts_here()
    operators = operator_table(EXAMPLE, needs, "bfloat16")
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    console.print(
        f"device     {found['num_devices']} x {escape(found['device'])} ({found['backend']}), {found['cores']} cores"
    )
    console.print(f"system     {found['platform']}")
    console.print(f"python     {found['python']}")
    console.print(f"packages   {packages}")
    console.print(f"XLA_FLAGS  {escape(found['xla_flags']) or '(none)'}")
    if names := hidden():
        console.print(f"hidden     {', '.join(names)} (KSANA_HIDE)")
    console.print(f"native     {escape(instructions())}")
    folder, sizes = store_folder(), [size for _, size, _ in entries(store_folder())]
    state = why_off() or f"{len(sizes)} entries, {sum(sizes) / 1e6:,.0f} MB; rm -r empties it"
    console.print(f"programs   {escape(f'{folder}: {state}')}")
    _print_operators(console, operators)
    lacks = why_not_invariant(EXAMPLE, needs, "bfloat16")
    console.print(f"numerics: fast{f'; invariant {escape(lacks)}' if lacks else ', invariant'}")
    verdicts = []
    for verdict in known:
        chosen, reason = verdict.choose([m.pair for m in verdict.measured])
        verdicts.append({"model": verdict.model, **verdict.conditions, "chosen": chosen._asdict(), "reason": reason})
        stored = f"{verdict.conditions['dtype']}, KV in {verdict.conditions['KV']}"
        console.print(f"operators.prefer: agreement, {escape(f'{verdict.model} in {stored}: {chosen}: {reason}')}")
    if not verdicts:
        console.print("operators.prefer: agreement needs a verdict of `ksana align --choose`; there is none here")
    if as_json:
        rows = [row._asdict() for row in operators]
        more = {"invariant": lacks is None, "verdicts": verdicts}
        more["programs"] = {"folder": str(folder), "entries": len(sizes), "bytes": sum(sizes), "off": why_off()}
        print(json.dumps({**found, "hidden": hidden(), "native": instructions(), "operators": rows, **more}))


def _print_model(model: str, as_json: bool) -> None:
    import json

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ksana_jax.engine.model_facts import model_facts

    facts = model_facts(model)
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in facts[0]:
        table.add_column(overflow="fold")
    for fact in facts:
        table.add_row(*map(escape, fact))
    Console(highlight=False).print(table)
    if as_json:
        print(json.dumps([fact._asdict() for fact in facts]))


def _print_operators(console: Console, rows: Sequence[OperatorRow]) -> None:
    """Prints the table of operators."""
    from ksana_jax.lab.runs.tables import terminal

    cells = []
    for row in rows:
        why = row.unsupported or (row.needs and f"runs on {row.needs}") or "runs everywhere"
        cells.append([row.operator, row.name, "yes" if row.used else "", why])
    heads = ["operator", "implementation", "used", "needs"]
    console.print("operators (for a Llama-8B in bfloat16; the setting `operators` has other choices):")
    console.print(terminal(heads, cells, [[False] * len(heads)] * len(cells), 0))
