"""`ksana plan`: prints a plan, and the memory of each bucket. Knows no arithmetic of memory."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ksana_jax.core.config import MAX_TOKENS, ConfigError
from ksana_jax.core.units import byte_size
from ksana_jax.devices.platforms import platform_of
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.state_layout import SLOTS_PER_ROW
from ksana_jax.runner.planner.devices import compile_target, find_device
from ksana_jax.runner.planner.solve import Plan, plan, read_model
from ksana_jax.runner.planner.step_memory import step_bytes
from ksana_jax.scheduler.step.ladders import all_shapes, make_buckets
from ksana_jax.sharding.absent import only_compile
from ksana_jax.sharding.shares import local_model
from pallas_kernels import aot


def main(model: str, device: str, *, buckets: bool = False, as_json: bool = False, **request) -> None:
    """Prints a plan; with as_json, the last line is one JSON object.

    Args:
      buckets: also list the memory of each bucket of steps, which compiles all of them.
      request: fields of `PlanRequest`.

    Raises:
      ConfigError: the request is invalid or, after the plan was printed, leaves no room for keys and values.
    """
    if find_device(device).target is not None and not aot.missing():
        only_compile()
    found = plan(model, device, say=functools.partial(print, file=sys.stderr, flush=True), **request)
    console = Console(highlight=False)
    show(found, console)
    listed = bucket_costs(model, found) if buckets else []
    if buckets:
        show_buckets(listed, found.alpha_from, console)
    if as_json:
        values = dataclasses.asdict(found) | ({"buckets": listed} if buckets else {})
        print(json.dumps(values), flush=True)
    if not found.max_kv_tokens:
        raise ConfigError(
            f"{found.model} does not fit on {found.device}: weights take {byte_size(found.weights_bytes)}, a step of "
            f"{_requests(found.batch)} {byte_size(found.step_bytes + found.alpha_bytes_per_request * found.batch)}, "
            f"of {byte_size(found.budget_bytes)} (memory_fraction {found.request.memory_fraction})"
        )


def show(found: Plan, console: Console) -> None:
    """Prints the memory of each term, the largest batch, context and window, and settings that would change them."""
    asked = found.request
    pattern = f"window {asked.window:,} + {asked.num_sinks} sinks" if asked.window else "the model's attention pattern"
    evicts = "".join(f", {key} {value}" for key, value in (asked.kv_eviction or {}).items())
    pattern += evicts and f", kv_eviction{evicts[1:]}"
    if (method := read_eviction(asked.kv_eviction)) is not None and method.hides:
        pattern += " (memory simulated: evicted tokens stay)"
    device, n = found.device, asked.tensor_parallel_size
    if n > 1:
        device = f"each of {n} x {device}, which divide the model"
        device += " but not its latents" if found.expanded_bytes_per_token is not None else ""
    console.print(escape(f"{found.model}, {found.num_params:,} weights, {pattern}"))
    console.print(
        escape(
            f"{device}: {asked.memory_fraction:.0%} of {byte_size(found.device_bytes)} is "
            f"{byte_size(found.budget_bytes)}\n\n"
            f"Mem = M + alpha BS + beta TN at BS = {_requests(found.batch)} of TA = {found.context:,} tokens, "
            f"gamma = {found.gamma:.3g}"
        )
    )
    table = _table(("", "bytes", "  ", ""))
    kv = found.kv_bytes_per_token * found.tokens_held
    host = f", {byte_size(found.host_bytes)} more on the host" if found.host_bytes else ""
    too_much = found.total_bytes - found.budget_bytes
    rows = [
        ("M: weights", found.weights_bytes, asked.dtype + host),
        ("M: a step", found.step_bytes, "without requests"),
        ("alpha BS", found.alpha_bytes_per_request * found.batch, _per_request(found)),
        ("beta TN", kv, f"{found.kv_bytes_per_token:,} per token, {found.tokens_held:,} tokens in {asked.kv_dtype}"),
        ("total", found.total_bytes, "fits" if found.fits else f"{byte_size(too_much)} too much"),
    ]
    for name, num_bytes, source in rows:
        table.add_row(name, f"{num_bytes:,}", byte_size(num_bytes), source)
    console.print(table)
    if (expanded := found.expanded_bytes_per_token) is not None:
        one, all_heads = (count // found.num_layers for count in (found.kv_bytes_per_token, expanded))
        console.print(f"Per token and layer: {one:,} bytes of a latent; expanded keys and values: {all_heads:,}.\n")
    if found.mean_bytes_per_token != found.kv_bytes_per_token:
        console.print(
            escape(f"Exact tokens included, a token takes an average of {found.mean_bytes_per_token:,.0f} bytes.\n")
        )
    window = "none fits" if found.max_window is None else f"{found.max_window:,} tokens"
    limits = [
        (f"largest batch at {found.context:,} tokens", f"{found.max_batch:,}"),
        (f"largest context at {_requests(found.batch)}", _context(found.max_context, found.max_position)),
        *([] if asked.kv_eviction else [("largest window at both", window)]),
        (f"tokens in the pool at {_requests(found.batch)}", f"{found.max_kv_tokens:,}"),
    ]
    if found.l2_tokens is not None:
        limits.append(("tokens whose KV fills the L2 cache", f"{found.l2_tokens:,}"))
    console.print(escape(f"Steps were compiled for {found.alpha_from}.\n"))
    for name, value in limits:
        console.print(escape(f"{name:<40}{value}"))
    console.print("\nWith one setting changed (the step's memory is assumed unchanged):")
    table = _table(("", "weights", "per token", "pool tokens", "batch", "context"))
    table.add_row("as planned", *_figures(found))
    for change in found.changes:
        table.add_row(change.name, *_figures(change))
    console.print(table)


def _table(columns: Sequence[str]) -> Table:
    """Returns a table without a frame, one line per row; named columns except the first hold numbers."""
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if name and index else "left", no_wrap=True)
    return table


def _figures(found) -> tuple[str, ...]:
    context = "no limit" if found.max_context == MAX_TOKENS else f"{found.max_context:,}"
    return (
        byte_size(found.weights_bytes),
        f"{found.mean_bytes_per_token:,.0f}",
        f"{found.max_kv_tokens:,}",
        f"{found.max_batch:,}",
        context,
    )


def _per_request(found: Plan) -> str:
    said, state = f"{found.alpha_bytes_per_request:,} per request", found.state_bytes_per_request
    tokens = state / SLOTS_PER_ROW / found.kv_bytes_per_token
    slots = f", {state:,} of them {SLOTS_PER_ROW} slots for states, each as much as {tokens:,.1f} tokens"
    return said + slots * bool(state)


def _requests(count: int) -> str:
    return f"{count:,} request" + "s" * (count > 1)


def _context(most: int, trained: int) -> str:
    if most == MAX_TOKENS:
        return f"memory sets no limit (trained for {trained:,})"
    return f"{most:,}" + (f" (trained for {trained:,})" if most > trained else "")


def bucket_costs(model: str, found: Plan) -> list[dict[str, Any]]:
    """Returns the bytes, besides weights and pool, of every bucket of an engine with the plan's batch and context."""
    asked = found.request
    config, _ = read_model(model)
    engine = dataclasses.replace(
        asked.stored,
        max_num_seqs=found.batch,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        query_tile=asked.query_tile,
        max_model_len=found.context,
    )
    target = compile_target(find_device(found.device))
    shapes = all_shapes(make_buckets(engine, "gpu" if target else platform_of(), model=config))
    measured = step_bytes(
        local_model(config, asked.tensor_parallel_size),
        shapes,
        max_model_len=found.context,
        target=target,
        **asked.of_steps,
    )
    return [
        {
            "parts": shape.parts,
            "table_width": shape.table_width,
            "expands_latents": shape.alone,
            "network_bytes": cost.network,
            "sampling_bytes": cost.sampling,
        }
        for shape, cost in zip(shapes, measured, strict=True)
    ]


def show_buckets(listed: list[dict[str, Any]], target: str, console: Console) -> None:
    """Prints the memory of each bucket while it runs. target: the device that it was compiled for."""
    console.print(escape(f"\nMemory of a step by bucket, besides weights and pool, compiled for {target}"))
    table = _table(("tiles x tokens", "table width", "network", "sampling"))
    for b in listed:
        parts = " + ".join(f"{count:,} x {width}" for count, width in b["parts"])
        parts += ", latents expanded" * b["expands_latents"]
        table.add_row(parts, f"{b['table_width']:,}", byte_size(b["network_bytes"]), byte_size(b["sampling_bytes"]))
    console.print(table)
