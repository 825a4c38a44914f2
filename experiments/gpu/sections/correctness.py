"""Every implementation against the float32 reference: fresh random inputs, poisoned outputs, NaN in every dead slot."""

from __future__ import annotations

import dataclasses
import inspect
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu.candidates import implementations, reference
from experiments.gpu.context import Context
from experiments.gpu.race import TOLERANCE, poisoned
from experiments.gpu.timing import compile_in_parallel
from pallas_kernels import arguments

# One query of one head may be off by more than all together: its probabilities are rounded to 8 bits, few weigh much.
ROW_TOLERANCE = 4e-2
LSE_TOLERANCE = 1e-2
MASS = "hopper_mass"
AT_ONCE = 8


def run(context: Context) -> None:
    specs = [*arguments.TINY, *arguments.TINY_QUANTISED, *arguments.SMALL]
    if context.tiny:
        specs = [*specs[:3], arguments.TINY_QUANTISED[0]]
    # Not the seeds of the tests.
    seed = time.time_ns() % 2**20
    specs = [dataclasses.replace(spec, seed=spec.seed + seed) for spec in specs]
    context.record("fact", name="seeds", first=seed)
    attends = implementations()
    # Ordered so that a shortage of time costs some of each kind.
    order = [specs[i] for start in range(AT_ONCE) for i in range(start, len(specs), AT_ONCE)]
    for begin in range(0, len(order), AT_ONCE):
        if context.left() < 8:
            context.record("fact", name="left out", specs=[str(s) for s in order[begin:]])
            break
        _check(context, order[begin : begin + AT_ONCE], attends)
    context.attempt("probability mass", lambda: _check_mass(context, seed))
    for name in [*attends, MASS]:
        count = _count(context, name)
        context.record("fact", name="correctness", who=name, **count)
        context.say(f"{name}: " + ", ".join(f"{n} {k}" for k, n in count.items()))
        wrong = count["wrong"] + count["failed"]
        if wrong + count["right"]:
            unit = f"of {wrong + count['right']}"
            context.value(f"correctness: wrong or failed specs of {name}", wrong, unit, bar=0, speed=False)


def _count(context: Context, who: str) -> dict[str, int]:
    """How an implementation fared; also before a restart."""
    count = {"right": 0, "wrong": 0, "unsupported": 0, "failed": 0}
    for r in context.past("check", "failed", "fault"):
        if r.get("who") == who:
            right = {"check": "right" if r.get("right") else "wrong", "fault": "failed"}.get(r["kind"])
            count[right or ("unsupported" if r["unsupported"] else "failed")] += 1
    return count


def _check(context: Context, specs: list[arguments.Spec], attends: dict[str, Any]) -> None:
    made, lowered = {}, []
    done = {(r["who"], r["case"]) for r in context.past("check", "failed") if "case" in r}  # before a restart
    for spec in specs:
        made[str(spec)] = args, keywords = arguments.make(spec)
        static = {k: keywords.pop(k) for k in ("soft_cap", "return_lse")}
        for name, attend in {"the reference": reference(), **attends}.items():
            if (name, str(spec)) in done or context.excluded(name, str(spec)):
                continue
            if "scales" in keywords and "scales" not in inspect.signature(attend).parameters:
                continue

            def call(args, keywords, attend=attend, static=static):
                return attend(*args, **keywords, **static)

            try:
                lowered.append((f"{name}|{spec}", jax.jit(call).lower(args, keywords)))
            except Exception as error:
                context.failed(f"{name} on {spec}", error, who=name, case=str(spec))
    compiled = compile_in_parallel(lowered, timeout_s=max(context.left() - 5, 1))
    for spec in specs:
        args, keywords = made[str(spec)]
        try:
            right = jax.block_until_ready(compiled[f"the reference|{spec}"](args, keywords))
        except Exception as error:
            context.failed(f"the reference on {spec}", error)
            continue
        for name in attends:
            program = compiled.get(f"{name}|{spec}")
            if program is None:
                continue
            try:
                if isinstance(program, Exception):
                    raise program
                with context.guard(name, str(spec)):
                    out = jax.block_until_ready(poisoned(program, args, keywords))
                    again = jax.block_until_ready(program(args, keywords))
                found = compare(out, right) | {"repeatable": _same(out, again)}
                context.record("check", metric="correctness", case=str(spec), who=name, ours=True, **found)
                if not found["right"]:
                    context.say(f"{name} is WRONG on {spec}: {found}")
            except Exception as error:
                context.failed(f"{name} on {spec}", error, who=name, case=str(spec))


def _check_mass(context: Context, seed: int) -> None:
    """The weight that each slot got, after the reference's attention; on machines without a GPU of the reference."""
    from pallas_kernels import hopper_mass
    from pallas_kernels import reference as exact

    weigh: Any = hopper_mass.probability_mass if jax.default_backend() == "gpu" else exact.probability_mass
    specs = [
        arguments.Spec(rows=((700, 1), (0, 0), (16, 1)), sink_logits=True, return_lse=True, seed=seed),
        arguments.Spec(rows=((290, 31),), q_tile=16, num_heads=8, head_dim=128, block_size=64, return_lse=True,
                       pattern=arguments.SINKS, evict_every=3, seed=seed + 1),
    ]  # fmt: skip
    for spec in specs:
        if context.excluded(MASS, str(spec)):
            continue
        arrays, keywords = arguments.make(spec)
        args: tuple[Any, ...] = (*arrays, reference()(*arrays, **keywords)[1])
        given = {k: x for k, x in keywords.items() if k not in ("sink_logits", "return_lse")}
        with context.guard(MASS, str(spec)):
            found = jax.block_until_ready(weigh(*args, **given))
        right = exact.probability_mass(*args, **given)
        error = float(jnp.linalg.norm(found - right) / jnp.linalg.norm(right))
        context.record("check", metric="correctness", case=str(spec), who=MASS, ours=True, error=error,
                       tolerance=TOLERANCE, right=error <= TOLERANCE)  # fmt: skip


def compare(out: Any, right: Any) -> dict[str, Any]:
    """Errors of (out, lse) or out against the reference's, and whether they are within the tolerances.

    Returns:
      error: relative, of all together. worst_row: of one query and head, relative to the larger of its own and a tenth
      of the typical size. lse_error: largest difference of log-sum-exps; those of -inf must be -inf on both sides.
    """
    out, lse = out if isinstance(out, tuple) else (out, None)
    right, right_lse = right if isinstance(right, tuple) else (right, None)
    a, b = (np.asarray(x.astype(jnp.float32), np.float64) for x in (out, right))
    if not np.isfinite(a).all():
        return {"right": False, "error": float("inf"), "not_finite": int((~np.isfinite(a)).sum())}
    size, off = np.linalg.norm(b, axis=-1), np.linalg.norm(a - b, axis=-1)
    typical = float(np.sqrt(np.mean(size**2)))
    found: dict[str, Any] = {
        "error": float(np.linalg.norm(off) / max(float(np.linalg.norm(size)), 1e-30)),
        "worst_row": float(np.max(off / np.maximum(size, max(0.1 * typical, 1e-30)))),
    }
    fine = found["error"] <= TOLERANCE and found["worst_row"] <= ROW_TOLERANCE
    if right_lse is not None:
        if lse is None:
            return found | {"right": False, "lse_error": "missing"}
        x, y = np.asarray(lse, np.float64), np.asarray(right_lse, np.float64)
        both = np.isfinite(x) & np.isfinite(y)
        found["lse_error"] = float(np.abs(x[both] - y[both]).max(initial=0.0))
        fine = fine and bool((np.isneginf(x) == np.isneginf(y)).all() and (both | np.isneginf(x)).all())
        fine = fine and found["lse_error"] <= LSE_TOLERANCE
    return found | {"right": bool(fine)}


def _same(a: Any, b: Any) -> bool:
    """Bit for bit: an error that moves from run to run would be a race."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b))
    return all(np.array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8)) for x, y in pairs)
