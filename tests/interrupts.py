"""Exceptions at random lines of everything that serves a request, on the device double of `tests.fakes`.

python -m tests.interrupts --seed 7            replays one
python -O -m tests.interrupts --examples 2000  looks for one that leaves damage; -O: nothing may rest on assertions
"""

from __future__ import annotations

import argparse
import collections
import linecache
import random
import sys
from types import FrameType
from typing import Any

import numpy as np

from ksana_jax.core.request import FinishReason
from ksana_jax.engine.engine import Request
from tests.expected import LONGEST
from tests.fakes import asking
from tests.simulation import Simulation

ERRORS = (KeyboardInterrupt, KeyboardInterrupt, KeyboardInterrupt, MemoryError, AssertionError)


class Damage(Exception):
    """An engine did not survive an exception."""


class Interrupt:
    """Raises an exception before a line of the package is executed, as a signal's handler would.

    Args:
      error: what is raised.
      after: lines before it. again: lines from there to a second one; None for no second one.
    """

    def __init__(self, error: BaseException, after: int, again: int | None):
        self._error, self._left, self._again = error, after, again
        self.where: list[str] = []
        self.num_lines = 0

    def __enter__(self) -> Interrupt:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if "ksana_jax" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event != "line":
            return self._line
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        # The interpreter looks for signals nowhere between the end of such a block and the release of its lock, nor at
        # `try`, which computes nothing and which the block that it is in does not cover.
        if text.startswith("with self._lock") or text == "try:":
            return self._line
        self.num_lines += 1
        self._left -= 1
        if not self._left:
            module = frame.f_globals["__name__"].removeprefix("ksana_jax.")
            self.where.append(f"{module}.{frame.f_code.co_qualname}: {text}")
            if self._again is not None:
                self._left, self._again = self._again, None
            raise self._error
        return self._line


class Trial:
    """A simulated engine that serves requests, is interrupted, and serves again."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.simulation = Simulation(self.rng)
        self.engine = self.simulation.engine

    def requests(self, count: int) -> list[Request]:
        """Requests of all kinds, as far as the engine can serve them."""
        made, rng = [], self.rng
        while len(made) < count:
            width = rng.choice([0, 0, 0, 2])
            most = rng.randint(1, 12)
            if width:
                params = asking(most, beam_width=width, n=rng.randint(1, width))
            else:
                params = asking(
                    most, n=rng.choice([1, 1, 3]), temperature=rng.choice([0, 1]), logprobs=rng.choice([None, 1])
                )
            prompt = self.simulation.text(rng.randint(1, 20))
            try:
                made.append(self.engine.new_request(prompt, params, streams=rng.random() < 0.5))
            except ValueError:  # never fits
                most = 0
            if not most and not made:
                made.append(self.engine.new_request(np.array([5], np.int32), asking(1)))
        return made

    def serve(self, requests: list[Request], most: int | None = None) -> None:
        """Serves requests, or stops to read after `most` outputs."""
        stream = self.engine.serve(requests)
        for at, _ in enumerate(stream):
            if at == most:
                stream.close()  # type: ignore[attr-defined]
                break

    def expect_right_tokens(self, requests: list[Request]) -> None:
        for request in requests:
            max_len = min(len(request.prompt_token_ids) + request.params.max_tokens, LONGEST)
            expected = self.simulation.expect(request, max_len, "").tokens
            got = [output.token_ids for output in request.output().outputs]
            if got != expected:
                raise Damage(f"{got} instead of {expected}")

    def expect_empty(self) -> None:
        engine, memory = self.engine, self.engine.memory
        engine.scheduler.check()
        if not engine.has_work:
            engine.step()  # what is still to be moved
        if self.simulation.disk is not None:
            self.simulation.disk.end_all()
            if memory.disk_reads is not None:
                memory.disk_reads.poll()
        if engine.has_work or engine.requests or engine._watched:
            raise Damage("requests are left")
        for tier in (memory.device, memory.host):
            if tier is None:
                continue
            pool, kept = tier.pool, int(np.count_nonzero(tier.pool.kept))
            if pool.ref_count.any() or pool.num_free + pool.num_idle != pool.num_blocks:
                raise Damage("blocks are still held")
            if not kept == pool.num_idle == len(tier.node_of):
                raise Damage("the books of cached blocks are wrong")

    def run(self) -> str:
        """Interrupts the engine once or twice: where, or "" if it was too late.

        Raises:
          Damage: what must hold afterwards does not.
        """
        rng = self.rng
        self.serve(self.requests(2))  # something is cached
        requests, most = self.requests(rng.randint(1, 5)), rng.choice([None, None, 0, 3])
        error = rng.choice(ERRORS)("as told")
        again = rng.choice([None, None, None, rng.randint(1, 20), rng.randint(1, 400)])
        interrupt = Interrupt(error, int(10 ** rng.uniform(0, 3.8)), again)
        try:
            with interrupt:
                self.serve(requests, most)
        except (KeyboardInterrupt, MemoryError, AssertionError) as raised:
            if raised is not error:
                raise Damage(f"{raised!r} instead of what was raised at {interrupt.where}") from raised
        else:
            if interrupt.where:
                raise Damage(f"what was raised at {interrupt.where} was swallowed")
        self.simulation.let_disk_go_on()
        if len(interrupt.where) < 2:
            if not all(request.finished or not request.completions[0].token_ids for request in requests):
                raise Damage("a request has neither ended nor begun")
            self.expect_empty()
        else:  # the second one may fall between all that cleans up, and before the next use
            for request_id in list(self.engine.requests):
                self.engine.abort(request_id)
        for request in requests:
            for output in request.output().outputs:
                if (output.finish_reason is FinishReason.ERROR) != (output.error is not None):
                    raise Damage("a request ended without a reason")
        more = self.requests(3)
        self.serve(more)
        self.simulation.let_disk_go_on()
        self.expect_right_tokens(more)
        self.expect_empty()
        return interrupt.where[0] if interrupt.where else ""


def interrupt_some(seeds: range) -> collections.Counter[str]:
    """Runs trials: how many interrupts hit each line; "" counts those that came too late.

    Raises:
      Damage: one ended badly; names its seed.
    """
    hit: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        try:
            hit[Trial(seed).run()] += 1
        except Exception as error:
            raise Damage(f"seed {seed}: {type(error).__name__}: {error}") from error
    return hit


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.interrupts")
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--examples", type=int, default=200)
    given = parser.parse_args()
    hit = interrupt_some(range(given.examples) if given.seed is None else range(given.seed, given.seed + 1))
    late = hit.pop("", 0)
    print(f"{hit.total()} interrupts at {len(hit)} lines, {late} came too late, no damage")


if __name__ == "__main__":
    _main()
