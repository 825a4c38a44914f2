"""Finds a record's prediction by the model of speed. No jax."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pallas_kernels.speed import baseline

# Names of devices, as drivers have them, that the model of speed knows.
DEVICES = ("NVIDIA H200",)
_CODES = {"int8": "int8", "e4m3": "float8_e4m3fn", "int4": "int4"}
_DECODES = {"decode, blocks of 64": "", "decode, blocks of 16": " b=16", "quantised": ""}
_STEPS = {"1 rows of 1024, hopper": "1 row of 1k", "64 rows of 2048, hopper": "64 rows of 2k"}
# Four products of one layer, as candidates of the section "products" run all of them.
_ALL_PRODUCTS = {"8 rows": ("hopper, all four", "hopper, nothing asked for ahead"), "64 rows": ("hopper, all four",)}
_PRODUCTS = ("qkv", "output", "gate_up", "down")


def names_of(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the case and the shape in `speed/baseline.json` of each kernel that a record times, if any."""
    metric, case, who = (str(record.get(name, "")) for name in ("metric", "case", "who"))
    if metric in _DECODES:
        kernel, _, kind = who.partition(", ")
        options = f" codes={_CODES.get(kind)}" if kind else _DECODES[metric]
        if kernel == "hopper_decode" and (not kind or kind in _CODES):
            return [(f"hopper attention{options}", case)]
        return [(f"triton decode{options}", case)] if who == "triton_decode" else []
    if who == "hopper_prefill" and metric == "prefill" and case.startswith("causal 8192"):
        return [("hopper prefill q=32", "causal 8k")]
    if who == "hopper_prefill" and metric == "mixed":
        return [("hopper prefill q=32", case)]
    if metric == "kv write" and who.startswith("hopper, 1 "):
        return [("hopper kv write", {"8192 tokens": "8k tokens"}.get(case, case))]
    if metric == "products" and who in _ALL_PRODUCTS.get(case, ()):
        rows = case.removesuffix(" rows")
        return [(f"hopper product rows={rows} product={name}", case) for name in _PRODUCTS]
    return []


def computed_us(record: Mapping[str, Any]) -> float | None:
    """Returns the stored prediction of a record of a time or of a step on the device; None without one."""
    if record["kind"] == "step":
        shape = _STEPS.get(record["case"]) if record["mode"] == "device" else None
        found = [step["ms"] * 1e3 for step in baseline.stored()["steps"] if step["shape"] == shape]
        return found[0] if found else None
    if record["mode"] == "dispatched":  # includes the host, which is not modelled
        return None
    cases = baseline.stored()["cases"]
    found = [cases.get(case, {}).get("shapes", {}).get(shape, {}).get("us") for case, shape in names_of(record)]
    return sum(found) if found and None not in found else None


def modelled(records: Iterable[Mapping[str, Any]]) -> bool:
    """True if the model knows the records' device."""
    return any(r.get("name") == "device" and r.get("device_kind") in DEVICES for r in records)
