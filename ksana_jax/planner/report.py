"""`ksana plan`: a plan as text, and the cost of each bucket. Knows no arithmetic of memory."""

from __future__ import annotations

import dataclasses
import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ksana_jax.batch import Buckets
from ksana_jax.planner.engine import gib
from ksana_jax.planner.solve import MAX_CONTEXT, Plan, PlanRequest, plan, read_model
from ksana_jax.planner.step_memory import compile_target, step_bytes


def main(model: str, device: str, *, buckets: bool = False, as_json: bool = False, **request) -> None:
    """Prints a plan; with as_json the last line is one JSON object.

    Args:
      buckets: list what each bucket of steps takes, too; compiles all of them.
      request: fields of `PlanRequest`.
    """
    found = plan(model, device, **request)
    console = Console(highlight=False)
    show(found, console)
    listed = bucket_costs(model, found) if buckets else []
    if buckets:
        show_buckets(listed, console)
    if as_json:
        values = dataclasses.asdict(found) | ({"buckets": listed} if buckets else {})
        print(json.dumps(values))


def show(found: Plan, console: Console) -> None:
    """Prints what each term takes, the largest of each, and what would change it."""
    asked = found.request
    pattern = f"window {asked.window:,} + {asked.num_sinks} sinks" if asked.window else "the model's attention pattern"
    console.print(
        escape(
            f"{found.model} ({found.num_params:,} weights, {asked.dtype}) on {found.device}: "
            f"{asked.memory_fraction:.0%} of {gib(found.device_bytes)} is {gib(found.budget_bytes)}; {pattern}"
        )
    )
    console.print(f"\nMem = M + alpha BS + beta TN at BS = {found.batch:,} requests of TA = {found.context:,} tokens")
    table = Table(box=None, pad_edge=False)
    for name, justify in (("", "left"), ("bytes", "right"), ("", "right"), ("from", "left")):
        table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
    step, alpha = found.step_bytes, found.alpha_bytes_per_request
    kv = found.kv_bytes_per_token * found.tokens_held
    host = f"; {gib(found.host_bytes)} more on the host" if found.host_bytes else ""
    kind = asked.kv_dtype or asked.dtype
    rows = [
        ("M: weights", found.weights_bytes, f"parameter tree in {asked.dtype}{host}"),
        ("M: a step without requests", step, f"compiled for {found.alpha_from}"),
        (f"alpha BS: {alpha:,} a request", alpha * found.batch, "the same"),
        (f"beta TN: {found.kv_bytes_per_token:,} a token", kv,
         f"TN = {found.tokens_held:,} tokens in {kind}, gamma = {found.gamma:.3g}"),
        ("together", found.total_bytes, "fits" if found.fits else f"{gib(found.total_bytes - found.budget_bytes)} too much"),
    ]  # fmt: skip
    for name, num_bytes, source in rows:
        table.add_row(name, f"{num_bytes:,}", gib(num_bytes), escape(source))
    console.print(table)
    window = "none fits" if found.max_window is None else f"{found.max_window:,} tokens"
    console.print(f"\nlargest batch at {found.context:,} tokens      {found.max_batch:,}")
    console.print(f"largest context at {found.batch:,} requests   {_context(found.max_context, found.max_position)}")
    console.print(f"largest window at both            {window}")
    console.print(f"tokens that the pool holds        {found.max_kv_tokens:,}")
    if found.l2_tokens is not None:
        console.print(f"tokens of KV that fill the L2     {found.l2_tokens:,}")
    table = Table(title="\nwhat would change it", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("weights", "bytes a token", "tokens in the pool", "largest batch", "largest context"):
        table.add_column(name, justify="right")
    table.add_row("as planned", *_figures(found))
    for change in found.changes:
        table.add_row(escape(change.name), *_figures(change))
    console.print(table)


def _figures(found) -> tuple[str, ...]:
    context = "no limit" if found.max_context == MAX_CONTEXT else f"{found.max_context:,}"
    return (gib(found.weights_bytes), f"{found.kv_bytes_per_token:,}", f"{found.max_kv_tokens:,}",
            f"{found.max_batch:,}", context)  # fmt: skip


def _context(most: int, trained: int) -> str:
    if most == MAX_CONTEXT:
        return f"memory sets no limit (trained for {trained:,})"
    return f"{most:,}" + (f" (trained for {trained:,})" if most > trained else "")


def bucket_costs(model: str, found: Plan) -> list[dict[str, int]]:
    """Bytes beside weights and pool of every bucket that an engine with the plan's batch and context has."""
    asked = found.request
    config, _ = read_model(model)
    buckets = _buckets(asked, found.batch, found.context)
    shapes = buckets.all_shapes()
    measured = step_bytes(config, shapes, dtype=asked.dtype, block_size=asked.block_size,
                          embedding_device=asked.embedding_device)  # fmt: skip
    return [
        {"num_singles": shape.num_singles, "num_tiles": shape.num_tiles, "query_tile": shape.query_tile,
         "table_width": shape.table_width, "network_bytes": cost.network, "sampling_bytes": cost.sampling}
        for shape, cost in zip(shapes, measured, strict=True)
    ]  # fmt: skip


def _buckets(asked: PlanRequest, batch: int, context: int) -> Buckets:
    tiles = -(-asked.max_num_batched_tokens // asked.query_tile)
    width = -(-context // asked.block_size)
    return Buckets.of(batch, tiles, width, asked.query_tile, 8 if asked.dtype == "bf16" else 1)


def show_buckets(listed: list[dict[str, int]], console: Console) -> None:
    """Prints what each bucket takes while it runs."""
    table = Table(title=f"\nbuckets, compiled for {escape(compile_target())}", title_justify="left", box=None,
                  pad_edge=False)  # fmt: skip
    for name in ("singles", "tiles", "table width", "network", "sampling"):
        table.add_column(name, justify="right")
    for b in listed:
        table.add_row(*(f"{b[name]:,}" for name in ("num_singles", "num_tiles", "table_width")),
                      gib(b["network_bytes"]), gib(b["sampling_bytes"]))  # fmt: skip
    console.print(table)
