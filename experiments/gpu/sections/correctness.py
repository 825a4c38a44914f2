"""Every implementation against the float32 reference: fresh random inputs, poisoned outputs, NaN in every dead slot."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu.candidates import LATENT, implementations, reference
from experiments.gpu.compiling import Compiling
from experiments.gpu.context import Context
from experiments.gpu.race import TOLERANCE, poisoned
from experiments.gpu.where import dump_tile, where_wrong
from pallas_kernels import arguments
from pallas_kernels.contract import Call, Kernel, Result

# One query of one head may be off by more than all together: its probabilities are rounded to 8 bits, few weigh much.
ROW_TOLERANCE = 4e-2
LSE_TOLERANCE = 1e-2
MASS = "hopper_mass"
REFERENCE = "the reference"
# Specs that are lowered before the ones before them are checked.
AT_ONCE = 2
_LLAMA = functools.partial(arguments.Spec, num_heads=32, num_kv_heads=8, head_dim=128, return_lse=True)
# Llama-8B's heads first: what the engine is for, and what a first minute has to say.
LLAMA = (
    _LLAMA(rows=((1500, 1), (0, 0), (64, 1), (700, 1)), block_size=64, seed=60),
    _LLAMA(rows=((700, 150), (129, 1)), q_tile=32, block_size=64, seed=61),
    _LLAMA(rows=((1500, 1), (0, 0), (17, 1), (700, 1)), block_size=16, pattern=arguments.SINKS, seed=62),
    _LLAMA(rows=((700, 150), (129, 1)), q_tile=32, block_size=16, pattern=arguments.WINDOW, seed=63),
)


def run(context: Context) -> None:
    # Not the seeds of the tests.
    seed = time.time_ns() % 2**20
    found = [dataclasses.replace(spec, seed=spec.seed + seed) for spec in sharded(specs(context.tiny), context.shard)]
    context.record("fact", name="seeds", first=seed)
    kernels = implementations()
    # Hopper's kernels on everything, then the rest.
    passes = [{n: k for n, k in kernels.items() if n.startswith("hopper") == first} for first in (True, False)]
    left_out = [f"{n} on {spec}" for chosen in passes if chosen for n, spec in check_all(context, found, chosen)]
    if left_out:
        context.record("fact", name="left out", specs=left_out)
    context.attempt("probability mass", lambda: _check_mass(context, seed))
    for name in [*kernels, MASS]:
        count = _count(context, name)
        context.record("fact", name="correctness", who=name, **count)
        context.say(f"{name}: " + ", ".join(f"{n} {k}" for k, n in count.items()))
        wrong = count["wrong"] + count["failed"]
        if wrong + count["right"]:
            unit = f"of {wrong + count['right']}"
            context.value(f"correctness: wrong or failed specs of {name}", wrong, unit, bar=0, speed=False)


def specs(tiny: bool) -> list[arguments.Spec]:
    """Llama's shapes, then all kinds interleaved, so that a shortage of time costs some of each."""
    if tiny:
        return [*arguments.TINY[:3], arguments.TINY_QUANTISED[0], arguments.LATENTS[1]]
    others = [
        *arguments.TINY,
        *arguments.TINY_QUANTISED,
        *arguments.LATENTS,
        *arguments.LATENTS_8_BITS,
        *arguments.SMALL,
    ]
    stride = 8
    return [*LLAMA, *(others[i] for start in range(stride) for i in range(start, len(others), stride))]


def sharded(specs: list[arguments.Spec], shard: str) -> list[arguments.Spec]:
    """Every N-th spec, beginning with the K-th, of "K/N"."""
    start, of = map(int, shard.split("/"))
    return specs[start - 1 :: of]


def _count(context: Context, who: str) -> dict[str, int]:
    """Results of an implementation, also from before a restart."""
    count = {"right": 0, "wrong": 0, "unsupported": 0, "failed": 0}
    for r in context.past("check", "failed", "fault"):
        if r.get("who") == who:
            right = {"check": "right" if r.get("right") else "wrong", "fault": "failed"}.get(r["kind"])
            count[right or ("unsupported" if r["unsupported"] else "failed")] += 1
    return count


def check_all(
    context: Context, found: list[arguments.Spec], kernels: dict[str, Kernel]
) -> list[tuple[str, arguments.Spec]]:
    """Checks implementations on all specs, compiling two at once; returns the pairs left for lack of time."""
    compiling, ahead = Compiling(context), []
    for index, spec in enumerate(found):
        if context.left() < 8:
            return [(name, spec) for spec in [*(s.spec for s in ahead), *found[index:]] for name in kernels]
        batch = _Batch(context, spec, kernels, compiling)
        # The first verdict waits for nothing else.
        ahead = [*ahead, batch]
        while ahead and (index == 0 or len(ahead) >= AT_ONCE):
            ahead.pop(0).check()
    for batch in ahead:
        batch.check()
    return []


class _Batch:
    """One spec: its arguments, and the programs of the implementations that take it."""

    def __init__(self, context: Context, spec: arguments.Spec, kernels: dict[str, Kernel], compiling: Compiling):
        self._context, self.spec, self._compiling = context, spec, compiling
        self._call, self._names = arguments.make(spec), []
        done = {(r["who"], r["case"]) for r in context.past("check", "failed") if "case" in r}  # before a restart
        wanted = {
            name: kernel
            for name, kernel in kernels.items()
            if (name, str(spec)) not in done
            and not context.excluded(name, str(spec))
            and _takes(name, kernel, spec, self._call)
        }
        for name, kernel in ({REFERENCE: reference()} | wanted if wanted else {}).items():
            try:
                with context.guard(name, str(spec), seconds=60):
                    lowered = jax.jit(lambda call, kernel=kernel: kernel(call)).lower(self._call)
            except Exception as error:
                context.failed(f"{name} on {spec}", error, who=name, case=str(spec))
                continue
            self._names.append(name)
            compiling.submit((name, str(self.spec)), lowered, who=name, case=str(spec))

    def check(self) -> None:
        """Runs each twice and records how far it is from the reference."""
        context, case = self._context, str(self.spec)
        names = [name for name in self._names if name != REFERENCE]
        if not names:
            return
        try:
            right = jax.block_until_ready(self._program(REFERENCE)(self._call))
        except Exception as error:
            context.failed(f"{REFERENCE} on {case}", error)
            return
        for name in names:
            try:
                program = self._program(name)
                with context.guard(name, case):
                    out = jax.block_until_ready(poisoned(program, self._call))
                    again = jax.block_until_ready(program(self._call))
                found = compare(out, right) | {"repeatable": same(out, again)}
                found |= _where(context, out, right, found["right"])
                if not found["right"]:
                    context.say(f"{name} is WRONG on {case}: {found}")
                context.record("check", metric="correctness", case=case, who=name, ours=True, **found)
            except Exception as error:
                context.failed(f"{name} on {case}", error, who=name, case=case)

    def _program(self, name: str) -> Any:
        while not self._compiling.done((name, str(self.spec))) and self._context.left() > 5:
            self._compiling.wait(0.05)
            time.sleep(0.01)
        return self._compiling.result((name, str(self.spec)))


def _takes(name: str, kernel: Kernel, spec: arguments.Spec, call: Call) -> bool:
    """True if a spec is worth a kernel's time: prefill kernels never get single queries, one has all latents."""
    if name.startswith("hopper_prefill") and spec.q_tile == 1:
        return False
    if name.startswith(("hopper", "triton")) and (name == LATENT) != (spec.sides == 1):
        return False
    return not (spec.codes and kernel.unsupported(call))


def _where(context: Context, out: Any, right: Any, is_right: bool) -> dict[str, Any]:
    """Errors by column and head; where a result is wrong by query too, and the run's first wrong tile as a file."""
    a, b = out.out, right.out
    found = where_wrong(a, b, ROW_TOLERANCE)
    if is_right:
        return {key: found[key] for key in ("by_columns", "by_head")}
    if found["tile"] is not None and dump_tile(context.out / "wrong_tile.npy", a, b, found["tile"]):
        found["dumped"] = "wrong_tile.npy"
    return found


def _check_mass(context: Context, seed: int) -> None:
    """The weight that each slot got, after the reference's attention; on machines without a GPU of the reference."""
    from pallas_kernels import reference as exact
    from pallas_kernels.hopper import mass as hopper_mass
    from pallas_kernels.hopper.schedule import Tuning

    def weigh(call: Call, lse):
        if jax.default_backend() == "gpu":
            return hopper_mass.probability_mass(call, lse, tuning=Tuning())
        return exact.probability_mass(call, lse)

    specs = [
        arguments.Spec(rows=((700, 1), (0, 0), (16, 1)), sink_logits=True, return_lse=True, seed=seed),
        arguments.Spec(
            rows=((290, 31),),
            q_tile=16,
            num_heads=8,
            head_dim=128,
            block_size=64,
            return_lse=True,
            pattern=arguments.SINKS,
            evict_every=3,
            seed=seed + 1,
        ),
    ]
    for spec in specs:
        if context.excluded(MASS, str(spec)):
            continue
        call = arguments.make(spec)
        lse: Any = reference()(call).lse
        with context.guard(MASS, str(spec)):
            found = jax.block_until_ready(weigh(call, lse))
        right = exact.probability_mass(call, lse)
        error = float(jnp.linalg.norm(found - right) / jnp.linalg.norm(right))
        context.record(
            "check",
            metric="correctness",
            case=str(spec),
            who=MASS,
            ours=True,
            error=error,
            tolerance=TOLERANCE,
            right=error <= TOLERANCE,
        )


def compare(result: Result, reference: Result) -> dict[str, Any]:
    """Errors of a result against the reference's, and whether they are within the tolerances.

    Returns:
      error: relative, of all together. worst_row: of one query and head, relative to the larger of its own and a tenth
      of the typical size. lse_error: largest difference of log-sum-exps; -inf must be -inf on both sides.
    """
    (out, lse, _), (right, right_lse, _) = result, reference
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


def same(a: Any, b: Any) -> bool:
    """Bit for bit: an error that moves from run to run would be a race."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b))
    return all(np.array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8)) for x, y in pairs)
