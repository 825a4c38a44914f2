"""Times candidates side by side on cases: compiles all, checks each against the reference, then interleaved rounds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.gpu.candidates import Candidate, reference, relative_error, rows_to_check
from experiments.gpu.cases import Arguments, Case
from experiments.gpu.context import Context
from experiments.gpu.peer import PeerError, TorchPeer
from experiments.gpu.timing import CHAIN, ROUNDS, Chained, Compiling, Dispatched, Sampler, chain, rounds
from pallas_kernels.patterns import Pattern

# bfloat16 keeps 8 bits: probabilities and outputs rounded to it give 2e-3 to 4e-3; a wrong block or mask gives 1e-1.
TOLERANCE = 1e-2

# (case, who, "chained", "dispatched" or "graph") -> seconds of one call, median
Measured = dict[tuple[str, str, str], float]
Get = Callable[[str, Any], Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A case, its candidates of jax, and its kinds of torch (see `torch_kernels.KINDS`)."""

    case: Case
    candidates: Sequence[Candidate]
    kinds: Sequence[str] = ()


def race(
    context: Context,
    metric: str,
    entries: Sequence[Entry],
    *,
    peer: TorchPeer | None = None,
    compile_s: float = 40.0,
    calls: int | None = None,
    work: Callable[[Case], dict[str, Any]] = lambda case: {"bytes": case.bytes},
) -> Measured:
    """Records a check and times of each candidate on each case, and returns the times.

    Args:
      compile_s: seconds after which candidates that are not compiled are left out.
      calls: of a chain; None takes CHAIN.
      work: fields of each time record: what one call does at least.
    """
    calls = calls or (3 if context.tiny else CHAIN)
    done = {r["case"] for r in context.past("time") if r["metric"] == metric}  # before a restart
    entries = [
        dataclasses.replace(e, candidates=[c for c in e.candidates if not context.excluded(c.name, e.case.name)])
        for e in entries
        if e.case.name not in done
    ]
    programs = _compile(context, entries, compile_s, calls)
    for entry in entries:
        if context.left() < 2:
            context.record("fact", metric=metric, case=entry.case.name, note="left out: no time")
            continue
        try:
            _one(context, metric, entry, programs, peer, calls, work(entry.case))
        except Exception as error:
            context.failed(f"{metric} {entry.case.name}", error, case=entry.case.name)
    times = [r for r in context.past("time") if r["metric"] == metric]
    return {(r["case"], r["who"], r["mode"]): r["us"] * 1e-6 for r in times}


def _compile(context: Context, entries: Sequence[Entry], timeout_s: float, calls: int) -> Get:
    """Lowers everything one by one and compiles it at once.

    Returns:
      (case name, what) -> program, for what in "data", "reference", ("layout", name) and (candidate name, "single" or
      "chained"); raises why there is none.
    """
    lowered: dict[tuple, Any] = {}
    failed: dict[tuple, Any] = {}
    for case, candidate in [(e.case, c) for e in entries for c in (None, *e.candidates)]:
        if context.left() < 5:
            break
        try:
            shapes, name = case.shapes(), case.name
            if candidate is None:
                lowered[name, "data"] = jax.jit(case.random).lower(jax.random.key(0))
                few = [jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in (shapes.q, *shapes[2:])]
                exact = functools.partial(reference(), pattern=Pattern(*case.pattern), out_dtype=jnp.float32, layer=0)
                lowered[name, "reference"] = jax.jit(exact).lower(few[0], shapes.pool, *few[1:])
                continue
            carry, shared, owns = jax.eval_shape(candidate.prepare, shapes)
            if candidate.layout and (name, ("layout", candidate.layout)) not in lowered:
                lowered[name, ("layout", candidate.layout)] = jax.jit(candidate.prepare).lower(shapes)
            lowered[name, (candidate.name, "single")] = jax.jit(candidate.step).lower(carry, shared, owns[0])
            lowered[name, (candidate.name, "chained")] = chain(candidate.step, calls).lower(carry, shared, owns)
        except Exception as error:
            failed[case.name, (candidate.name if candidate else "data", "single")] = error
    context.say(f"compiling {len(lowered)} programs for {len(entries)} cases")
    compiling = Compiling(list(lowered.items()))
    context.say(f"compiled {compiling.wait(timeout_s)} of {len(lowered)}")

    def get(case: str, what: Any) -> Any:
        program = failed.get((case, what))
        if program is None and isinstance(what, tuple):
            program = failed.get((case, (what[0], "single")))
        if program is None:  # late ones may come while others are timed
            program = compiling.result((case, what), max(min(10.0, context.left() / 4), 0.0))
        if isinstance(program, Exception):
            raise program
        return program

    return get


def _one(context: Context, metric: str, entry: Entry, programs: Get, peer, calls: int, work: dict[str, Any]) -> None:
    case, verdicts = entry.case, {}
    samplers: dict[tuple[str, str], Sampler] = {}
    modes: dict[tuple[str, str], tuple[str, bool]] = {}
    get = functools.partial(programs, case.name)
    a = case.arguments(get("data"))
    rows = rows_to_check(case, a.q.shape[0])
    right = jnp.concatenate([_of_row(get("reference"), a, row) for row in rows])
    prepared: dict[str, Any] = {}

    def guarded(sampler: Sampler, who: str) -> Sampler:
        def sample() -> float:
            with context.guard(who, case.name):
                return sampler()

        return sample

    def record_check(who: str, is_ours: bool, error: float) -> None:
        verdicts[who] = error <= TOLERANCE
        context.record("check", metric=metric, case=case.name, who=who, ours=is_ours, error=error,
                       tolerance=TOLERANCE, right=verdicts[who])  # fmt: skip
        if not verdicts[who]:
            context.say(f"{who} on {case.name} is WRONG: relative error {error:.3g}")

    for candidate in entry.candidates:
        name = candidate.name
        try:
            single, chained = get((name, "single")), get((name, "chained"))
            layout = candidate.layout or name
            if layout not in prepared:
                make = get(("layout", layout)) if candidate.layout else candidate.prepare
                prepared[layout] = jax.block_until_ready(make(a))
            carry, shared, owns = prepared[layout]
            with context.guard(name, case.name):
                out = candidate.result(jax.block_until_ready(poisoned(single, carry, shared, owns[0])))
            wanted = right
            if candidate.seen:
                seen = candidate.seen(a)
                wanted = jnp.concatenate([_of_row(get("reference"), seen, row) for row in rows])
            record_check(name, candidate.ours, relative_error(out[rows], wanted))

            def call(index, single=single, carry=carry, shared=shared, owns=owns):
                return single(carry, shared, owns[index % len(owns)])

            sample_s = 0.002 if context.tiny else 0.02
            with context.guard(name, case.name):
                both = {
                    "chained": Chained(chained, jnp.copy(carry), shared, owns, calls, sample_s),
                    "dispatched": Dispatched(call, calls),
                }
            for mode, sampler in both.items():
                samplers[name, mode], modes[name, mode] = guarded(sampler, name), (mode, candidate.ours)
        except Exception as error:
            context.failed(f"{name} on {case.name}", error, who=name, case=case.name)
    del a
    for kind in entry.kinds:
        if peer is None or kind in peer.absent:
            continue
        try:
            answer = peer.ask("prepare", kind=kind, calls=calls, timeout_s=40, **torch_case(case, context.tiny))
            record_check(kind, False, answer["relative_error"])
            samplers[kind, "graph"] = functools.partial(_ask_sample, peer, kind)
            modes[kind, "graph"] = (answer["mode"], False)
        except PeerError as error:
            context.failed(f"{kind} on {case.name}", error, who=kind, case=case.name)
    times, failed = rounds(samplers, count=3 if context.tiny else ROUNDS, left=lambda: context.left() - 1)
    for key, error in failed.items():
        context.failed(f"{key[0]} on {case.name}", error, who=key[0], case=case.name)
    own_work = {c.name: {"bytes": c.bytes} for c in entry.candidates if c.bytes}
    for key, t in times.items():
        mode, is_ours = modes[key]
        context.record("time", metric=metric, case=case.name, who=key[0], ours=is_ours, mode=mode,
                       right=verdicts.get(key[0]), **t.fields(), **(work | own_work.get(key[0], {})))  # fmt: skip
    fastest = sorted((t.median * 1e6, *key) for key, t in times.items())[:4]
    context.say(f"{metric} {case.name}: " + ", ".join(f"{who} {mode} {us:.1f} us" for us, who, mode in fastest))
    if peer is not None and entry.kinds:
        context.attempt("freeing torch's arrays", lambda: peer.ask("free", timeout_s=10))


def _of_row(call: Callable[..., Any], a: Arguments, row: int) -> Any:
    """The reference's output for one query tile: all of several long rows at once would be large."""
    q, tables, starts, positions = (x[row : row + 1] for x in (a.q, *a[2:]))
    return call(q, a.pool, tables, starts, positions)


def _ask_sample(peer: TorchPeer, kind: str) -> float:
    return peer.ask("sample", kind=kind, timeout_s=20)["seconds"]


def poisoned(call: Any, *args: Any) -> Any:
    """call(*args) of a compiled program, run where NaN was: what it does not write stays NaN, as far as it gets the
    same memory."""
    bad = [jnp.full(x.shape, jnp.nan, x.dtype) for x in jax.tree.leaves(call.out_info) for _ in range(3)
           if jnp.issubdtype(x.dtype, jnp.floating)]  # fmt: skip
    for x in jax.block_until_ready(bad):
        x.delete()
    return call(*args)


def torch_case(case: Case, tiny: bool) -> dict[str, Any]:
    """A case as the torch process wants it."""
    return {
        "lengths": list(case.lengths), "num_heads": case.num_heads, "num_kv_heads": case.num_kv_heads,
        "head_dim": case.head_dim, "block_size": case.block_size, "prefill": case.prefill, "sets": case.num_layers,
        "window": case.pattern[0], "sinks": case.pattern[1], "tiny": tiny,
    }  # fmt: skip
