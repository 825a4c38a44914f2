"""Programs of cases and candidates: lowered one by one while others compile, the next case's during waits."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.gpu.candidates import Candidate, reference
from experiments.gpu.cases import Arguments, Case
from experiments.gpu.compiling import Compiling
from experiments.gpu.context import Context
from experiments.gpu.timing import chain
from pallas_kernels.patterns import Pattern

# Programs of a case itself, instead of a candidate's name.
DATA, REFERENCE = "data", "reference"


class Programs:
    """Programs by case and name.

    Args:
      calls: of a chain.
    """

    def __init__(self, context: Context, calls: int):
        self._context, self._calls = context, calls
        self._compiling = Compiling(context)
        self._lowered: dict[tuple[str, str], list[Any]] = {}  # (case, candidate) -> names of its programs
        self._failed: dict[tuple[str, str], Exception] = {}

    @property
    def pending(self) -> int:
        """Programs that are being compiled, or wait to be."""
        return self._compiling.pending

    def lower_next(self, case: Case, candidates: list[Candidate]) -> bool:
        """Lowers one more candidate of a case and has it compiled; False where none is left."""
        if (case.name, DATA) not in self._lowered:
            self._lower(case, None)
            return True
        left = (c for c in candidates if (case.name, c.name) not in self._lowered)
        candidate = next(left, None)
        if candidate is not None:
            self._lower(case, candidate)
        return candidate is not None

    def make(self, case: Case, candidates: list[Candidate], *, until: float, following=None) -> None:
        """Lowers a case's candidates and waits until they are compiled, lowering the next case's.

        Args:
          until: `time.monotonic()` at which what is ready has to do, if a candidate is.
          following: arguments of `lower_next`.
        """

        def enough() -> bool:
            out_of_time = time.monotonic() > until or self._context.left() < 3
            return out_of_time and (self._context.left() < 3 or any(self.ready(case, c) for c in candidates))

        while not enough() and self.lower_next(case, candidates):
            pass
        while not enough() and not all(self.ready(case, c) for c in candidates):
            if following is None or not self.lower_next(*following):
                self._compiling.wait(0.05)
                time.sleep(0.01)

    def ready(self, case: Case, candidate: Candidate) -> bool:
        """True if a candidate can be run, or has been ruled out."""
        if (case.name, candidate.name) in self._failed or (case.name, DATA) in self._failed:
            return True
        both = [self._lowered.get((case.name, name)) for name in (DATA, candidate.name)]
        return all(names is not None and all(map(self._compiling.done, names)) for names in both)

    def get(self, case: Case, what: Any) -> Any:
        """A program: DATA, REFERENCE, ("layout", name), or (candidate, "single" or "chained").

        Raises:
          Exception: why there is none.
        """
        for who in (DATA, what[0] if isinstance(what, tuple) else DATA):
            if error := self._failed.get((case.name, who)):
                raise error
        return self._compiling.result((case.name, what))

    def _lower(self, case: Case, candidate: Candidate | None) -> None:
        who = candidate.name if candidate else DATA
        self._lowered[case.name, who] = names = []
        try:
            with self._context.guard(who, case.name, seconds=60):
                found = self._of_candidate(case, candidate) if candidate else self._of_case(case)
        except Exception as error:
            self._failed[case.name, who] = error
            return
        for what, lowered in found:
            names.append((case.name, what))
            self._compiling.submit((case.name, what), lowered, who=who, case=case.name)

    def _of_case(self, case: Case) -> list[tuple[Any, Any]]:
        shapes = case.shapes()
        few = [jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in (shapes.q, *shapes[2:])]

        def exact(*arrays):
            call = Arguments(*arrays).call(pattern=Pattern(*case.pattern), out_dtype=jnp.float32)
            return reference()(call).out

        return [
            (DATA, jax.jit(case.random).lower(jax.random.key(0))),
            (REFERENCE, jax.jit(exact).lower(few[0], shapes.pool, *few[1:])),
        ]

    def _of_candidate(self, case: Case, candidate: Candidate) -> list[tuple[Any, Any]]:
        found, shapes, name = [], case.shapes(), candidate.name
        carry, shared, owns = jax.eval_shape(candidate.prepare, shapes)
        layout = (case.name, ("layout", candidate.layout))
        if candidate.layout and not any(layout in names for names in self._lowered.values()):
            found.append((layout[1], jax.jit(candidate.prepare).lower(shapes)))
        if not candidate.part:
            found.append(((name, "single"), jax.jit(candidate.step).lower(carry, shared, owns[0])))
        return [*found, ((name, "chained"), chain(candidate.step, self._calls).lower(carry, shared, owns))]
