"""Times candidates side by side on cases: each is compiled, checked against the reference, and timed in rounds.

    lower case 1 | wait, lowering case 2 | time case 1 | lower the rest of 2 | wait, lowering case 3 | time case 2 | ...

Threads compile all along. A candidate that is not compiled when its case's turn comes is timed after the last case.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.gpu.candidates import Candidate, relative_error, rows_to_check
from experiments.gpu.cases import Arguments, Case
from experiments.gpu.context import Context
from experiments.gpu.peer import PeerError, TorchPeer
from experiments.gpu.programs import DATA, REFERENCE, Programs
from experiments.gpu.timing import CHAIN, ROUNDS, Chained, Dispatched, Sampler, measured
from experiments.gpu.where import where_wrong

# bfloat16 keeps 8 bits: probabilities and outputs rounded to it give 2e-3 to 4e-3; a wrong block or mask gives 1e-1.
TOLERANCE = 1e-2
# Seconds into a section when its first case is timed with the compiled programs.
FIRST_S = 15.0
# Seconds before its end when a section times the late programs that are compiled.
LATE_S = 8.0

# (case, who, "chained", "dispatched", "part" or "graph") -> seconds of one call, median
Measured = dict[tuple[str, str, str], float]


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
    calls: int | None = None,
    work: Callable[[Case], dict[str, Any]] = lambda case: {"bytes": case.bytes},
) -> Measured:
    """Records a check and times of each candidate on each case, and returns the times.

    Args:
      calls: of a chain; None takes CHAIN.
      work: fields of each time record: what one call does at least.
    """
    calls = calls or (3 if context.tiny else CHAIN)
    done = {r["case"] for r in context.past("time") if r["metric"] == metric}  # before a restart
    todo = [
        (e, [c for c in e.candidates if not context.excluded(c.name, e.case.name)])
        for e in entries
        if e.case.name not in done
    ]
    programs, late = Programs(context, calls), []
    for index, (entry, candidates) in enumerate(todo):
        following = next(((e.case, c) for e, c in todo[index + 1 :]), None)
        if context.left() < 2:
            context.record("fact", metric=metric, case=entry.case.name, note="left out: no time")
            continue
        until = float("inf") if context.has_timed else context.began + FIRST_S
        programs.make(entry.case, candidates, until=until, following=following)
        ready = [c for c in candidates if programs.ready(entry.case, c)]
        late.append((entry.case, [c for c in candidates if c not in ready]))
        _guarded(context, metric, _Lap(context, metric, entry.case, programs, calls, work), ready, peer, entry.kinds)
    for case, candidates in late:
        if candidates and context.left() > 2:
            programs.make(case, candidates, until=context.ends - LATE_S)
            _guarded(context, metric, _Lap(context, metric, case, programs, calls, work, late=True), candidates)
    times = [r for r in context.past("time") if r["metric"] == metric]
    return {(r["case"], r["who"], r["mode"]): r["us"] * 1e-6 for r in times}


def _guarded(context: Context, metric: str, lap: _Lap, candidates: Sequence[Candidate], peer=None, kinds=()) -> None:
    try:
        lap.run(candidates, peer, kinds)
    except Exception as error:
        context.failed(f"{metric} {lap.case.name}", error, case=lap.case.name)


@dataclasses.dataclass
class _Lap:
    """One case: its arguments, the samplers of the prepared candidates, their verdicts."""

    context: Context
    metric: str
    case: Case
    programs: Programs
    calls: int
    work: Callable[[Case], dict[str, Any]]
    late: bool = False

    def __post_init__(self):
        self.verdicts: dict[str, bool] = {}
        self.samplers: dict[tuple[str, str], Sampler] = {}
        self.modes: dict[tuple[str, str], tuple[str, bool]] = {}
        self.prepared: dict[str, Any] = {}

    def run(self, candidates: Sequence[Candidate], peer: TorchPeer | None, kinds: Sequence[str]) -> None:
        a = self.case.arguments(self._get(DATA))
        rows = rows_to_check(self.case, a.q.shape[0])
        right = self._right(a, rows)
        for candidate in candidates:
            try:
                self._prepare(candidate, a, rows, right)
            except Exception as error:
                self._failed(candidate.name, error)
        del a, right
        for kind in kinds:
            if peer is not None and kind not in peer.absent:
                self._prepare_torch(peer, kind)
        pending = self.programs.pending
        count = 3 if self.context.tiny else ROUNDS
        times, failed, readings = measured(self.context, self.samplers, count=count)
        for (who, _), error in failed.items():
            self._failed(who, error)
        own_work = {c.name: {"bytes": c.bytes} for c in candidates if c.bytes}
        for key, t in times.items():
            mode, is_ours = self.modes[key]
            # Concurrent compilation takes processors, and its autotuning the GPU: such times are marked.
            self.context.record(
                "time",
                metric=self.metric,
                case=self.case.name,
                who=key[0],
                ours=is_ours,
                mode=mode,
                late=self.late,
                right=self.verdicts.get(key[0]),
                compiling=pending,
                **t.fields(),
                **readings,
                **(self.work(self.case) | own_work.get(key[0], {})),
            )
        fastest = sorted((t.median * 1e6, *key) for key, t in times.items())[:4]
        said = ", ".join(f"{who} {mode} {us:.1f} us" for us, who, mode in fastest)
        self.context.say(f"{self.metric} {self.case.name}: {said}")
        if peer is not None and kinds:
            self.context.attempt("freeing torch's arrays", lambda: peer.ask("free", timeout_s=10))

    def _prepare(self, candidate: Candidate, a: Arguments, rows: Any, right: Any) -> None:
        """Checks a candidate and makes its samplers."""
        name, case = candidate.name, self.case.name
        if self.context.left() < 1:
            raise TimeoutError("no time was left")
        chained = self._get((name, "chained"))
        layout = candidate.layout or name
        if layout not in self.prepared:
            make = self._get(("layout", layout)) if candidate.layout else candidate.prepare
            with self.context.guard(name, case):
                self.prepared[layout] = jax.block_until_ready(make(a))
        carry, shared, owns = self.prepared[layout]
        sample_s = 0.002 if self.context.tiny else 0.02
        made: dict[str, Sampler] = {}
        if not candidate.part:
            single = self._get((name, "single"))
            with self.context.guard(name, case):
                out = candidate.result(jax.block_until_ready(poisoned(single, carry, shared, owns[0])))
            wanted = self._right(candidate.seen(a), rows) if candidate.seen else right
            error = relative_error(out[rows], wanted)
            more = {} if error <= TOLERANCE else where_wrong(out[rows], wanted, TOLERANCE)
            self._check(name, candidate.ours, error, **more)
            with self.context.guard(name, case):
                made["dispatched"] = Dispatched(lambda i: single(carry, shared, owns[i % len(owns)]), self.calls)
        with self.context.guard(name, case):
            mode = "part" if candidate.part else "chained"
            made[mode] = Chained(chained, jnp.copy(carry), shared, owns, self.calls, sample_s)
        for mode, sampler in made.items():
            self.samplers[name, mode] = functools.partial(self._sample, name, sampler)
            self.modes[name, mode] = (mode, candidate.ours)

    def _prepare_torch(self, peer: TorchPeer, kind: str) -> None:
        try:
            asked = torch_case(self.case, self.context.tiny)
            answer = peer.ask("prepare", kind=kind, calls=self.calls, timeout_s=40, **asked)
            self._check(kind, False, answer["relative_error"])
            self.samplers[kind, "graph"] = lambda: peer.ask("sample", kind=kind, timeout_s=20)["seconds"]
            self.modes[kind, "graph"] = (answer["mode"], False)
        except PeerError as error:
            self._failed(kind, error)

    def _get(self, what: Any) -> Any:
        return self.programs.get(self.case, what)

    def _right(self, a: Arguments, rows: Any) -> Any:
        """The reference's output for some query tiles, one by one: all of several long rows would be large."""
        call = self._get(REFERENCE)
        each = [[x[row : row + 1] for x in (a.q, *a[2:])] for row in rows]
        return jnp.concatenate([call(q, a.pool, *rest) for q, *rest in each])

    def _sample(self, who: str, sampler: Sampler) -> float:
        with self.context.guard(who, self.case.name):
            return sampler()

    def _check(self, who: str, is_ours: bool, error: float, **more: Any) -> None:
        self.verdicts[who] = error <= TOLERANCE
        self.context.record(
            "check",
            metric=self.metric,
            case=self.case.name,
            who=who,
            ours=is_ours,
            error=error,
            tolerance=TOLERANCE,
            right=self.verdicts[who],
            **more,
        )
        if not self.verdicts[who]:
            self.context.say(f"{who} on {self.case.name} is WRONG: relative error {error:.3g} {more or ''}")

    def _failed(self, who: str, error: Exception) -> None:
        self.context.failed(f"{who} on {self.case.name}", error, who=who, case=self.case.name)


def poisoned(call: Any, *args: Any) -> Any:
    """call(*args) of a compiled program, run where NaN was: what it does not write stays NaN, as far as it gets the
    same memory."""
    bad = [
        jnp.full(x.shape, jnp.nan, x.dtype)
        for x in jax.tree.leaves(call.out_info)
        for _ in range(3)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    for x in jax.block_until_ready(bad):
        x.delete()
    return call(*args)


def torch_case(case: Case, tiny: bool) -> dict[str, Any]:
    """A case as the torch process wants it."""
    return {
        "lengths": list(case.lengths),
        "num_heads": case.num_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim": case.head_dim,
        "block_size": case.block_size,
        "prefill": case.prefill,
        "sets": case.num_layers,
        "window": case.pattern[0],
        "sinks": case.pattern[1],
        "tiny": tiny,
    }
