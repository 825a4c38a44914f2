"""Random simulations of an `AsyncLLM`: an engine of random shape on a fake device and disk, see `tests.simulation`, and
clients that read, dawdle, leave and abort.

python -m tests.engine.async_simulations --examples 1000 --first 0
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import gc
import logging
import random
import time

import numpy as np

from ksana_jax.core.outputs import RequestOutput
from ksana_jax.core.request import FinishReason, SamplingParams
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.engine.output_buffer import joined
from ksana_jax.engine.request_stream import RequestStream
from tests.expected import LONGEST
from tests.fakes import FakeExecutor, asking, check_books
from tests.simulated_requests import Expected
from tests.simulation import Simulation

# A client that waits longer than this hangs.
TIMEOUT_S = 60.0


class AsyncSimulation:
    """An AsyncLLM around a simulation's engine, and its clients.

    Args:
      rng: decides the engine and the clients' wishes; how their tasks and the engine's steps interleave varies.
    """

    def __init__(self, rng: random.Random):
        self.rng, self.simulation = rng, Simulation(rng)
        self.engine = self.simulation.engine
        self.seen: collections.Counter[str] = collections.Counter()
        executor = self.engine.executor
        assert isinstance(executor, FakeExecutor)
        self.executor, self.failed = executor, True
        self._compute = self.engine._step
        self.engine._step = self._step  # pyright: ignore[reportAttributeAccessIssue]

    def _step(self, *asked) -> list:
        """A step, after which the books are checked; in the engine's thread."""
        self.simulation.let_disk_go_on()  # the reset after a failed step makes new tiers
        try:
            reported = self._compute(*asked)
        except FakeExecutor.Failed:
            self.executor.fails, self.failed = None, True
            raise
        self.failed = False
        check_books(self.engine)
        if self.simulation.disk is not None:
            self.simulation.disk.tick()
        return reported

    async def live(self, num_clients: int) -> None:
        """Serves clients; then nothing is left."""
        async with AsyncLLM.around(self.engine) as llm:
            clients = [asyncio.create_task(self._client(llm)) for _ in range(num_clients)]
            for client in clients:
                if self.rng.random() < 0.1:
                    await asyncio.sleep(0)
                    client.cancel()
                    self.seen["cancelled"] += 1
                if self.rng.random() < 0.1:
                    self._trouble()
            ended = await asyncio.wait_for(asyncio.gather(*clients, return_exceptions=True), TIMEOUT_S)
            for error in ended:
                if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                    raise error
            gc.collect(0)  # streams of cancelled clients
            assert await llm.drain(TIMEOUT_S), "work is left that makes no progress"
            assert llm.is_alive and not llm.stats().num_requests
        self._check_idle(llm)
        counters = self.engine.memory.counters
        self.seen["preemptions"] += self.engine.scheduler.num_preemptions
        self.seen.update(hits_host=counters.hits_host, hits_disk=counters.hits_disk, swapped=counters.swapped_out)

    def _trouble(self) -> None:
        """The device fails once, unless the last step has; or the disk slows down, fails or forgets."""
        if not self.failed and self.rng.random() < 0.3:
            self.executor.fails = self.rng.choice(["before moves", "after moves"])
            self.seen["failures"] += 1
        else:
            self.simulation.disk_trouble()

    async def _client(self, llm: AsyncLLM) -> None:
        """Asks for one completion or a few, and behaves in one of several ways."""
        rng = self.rng
        for _ in range(rng.choice([0, 0, 1, 5, 20])):
            await asyncio.sleep(0)
        params, length = self._params(), rng.randint(1, LONGEST if rng.random() < 0.5 else 10)
        prompt, salt = self.simulation.text(length), rng.choice(["", "", "other"])
        max_len = min(length + (params.max_tokens or 0), LONGEST)
        delta, behaviour = rng.random() < 0.7, rng.choice(["read", "read", "read", "leave", "drop", "abort", "result"])
        streams = behaviour != "result" or rng.random() < 0.3
        refusal = self.simulation.refusal(length, max_len, params)
        try:
            stream = await llm.submit(prompt, params, cache_salt=salt, delta=delta, streams=streams)
        except ValueError as error:
            assert refusal and refusal in str(error)
            self.seen["refused"] += 1
            return
        assert not refusal
        self.seen[behaviour] += 1
        request = llm._open.by_id[stream.request_id].request
        expected = self.simulation.expect(request, max_len, salt)
        if behaviour == "result":
            return self._check(await stream.result(), expected, aborts=False)
        pieces = await self._read(llm, stream, behaviour, rng.randint(0, 6), rng.choice([0, 0, 0, 3]))
        if not pieces:
            return
        output = joined(pieces) if delta else pieces[-1]
        if output.finished:
            assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        self._check(output, expected, aborts=behaviour == "abort")

    def _params(self) -> SamplingParams:
        rng = self.rng
        if rng.random() < 0.08:
            return asking(rng.randint(1, 6), beam_width=rng.randint(1, 3), ignore_eos=rng.random() < 0.5)
        return asking(
            rng.randint(1, 24),
            n=rng.choice([1, 1, 1, 2, 3]),
            temperature=rng.choice([0, 0, 1]),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice([None, None, 0]),
        )

    async def _read(
        self, llm: AsyncLLM, stream: RequestStream, how: str, most: int, dawdle: int
    ) -> list[RequestOutput]:
        """Reads a stream to its end, or up to a number of outputs before the client leaves or aborts."""
        pieces: list[RequestOutput] = []
        async for piece in stream:
            pieces.append(piece)
            for _ in range(dawdle):
                await asyncio.sleep(0)
            if len(pieces) < most or how == "read":
                continue
            if how == "abort":
                await llm.abort(stream.request_id)
                assert stream.request_id not in self.engine.requests
                await llm.abort(stream.request_id)
            else:
                if how == "leave":
                    stream.close()
                break
        return pieces

    def _check(self, output: RequestOutput, expected: Expected, aborts: bool) -> None:
        """A request's output is the beginning of its prompt's output alone, and its end the right one."""
        for completion, tokens in zip(output.outputs, expected.tokens, strict=True):
            assert completion.token_ids == tokens[: len(completion.token_ids)]
            match completion.finish_reason:
                case None:
                    assert not output.finished
                case FinishReason.ERROR:
                    assert self.seen["failures"] and completion.error == "Failed: as told"
                    self.seen["errors"] += 1
                case FinishReason.ABORT:
                    assert aborts
                case _:
                    assert completion.token_ids == tokens

    def _check_idle(self, llm: AsyncLLM) -> None:
        """All is as in the beginning."""
        stats, memory = llm.stats(), self.engine.memory
        assert (stats.num_requests, stats.num_sequences, stats.num_prefill_tokens) == (0, 0, 0)
        assert (stats.num_running, stats.num_waiting, stats.blocks_in_use) == (0, 0, 0)
        if memory.host is not None:
            # A read that nobody waits for any more keeps its slot as long as the disk writes to it.
            reads = memory.disk_reads
            assert memory.host.pool.num_used == (0 if reads is None else len(reads.late(memory.host)))
            if self.simulation.disk is not None:
                self.simulation.disk.end_all()
            self.engine.step()
            if reads is not None:
                reads.poll()
            assert memory.host.pool.num_used == 0
        assert not self.engine.requests and not self.engine._watched and not self.engine.num_steps_under_way
        assert not llm._threads[0]._requests and llm.replicas.replicas[0].load == 0
        self.engine.scheduler.check()


def live(seed: int, num_clients: int = 24) -> AsyncSimulation:
    """Runs the simulation of a seed, with up to that many clients."""
    rng = random.Random(seed)
    run = AsyncSimulation(rng)
    asyncio.run(run.live(rng.randint(1, num_clients)))
    return run


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.async_simulations")
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--clients", type=int, default=24)
    given = parser.parse_args()
    logging.disable(logging.ERROR)  # failing steps
    began, seen = time.perf_counter(), collections.Counter()
    for seed in range(given.first, given.first + given.examples):
        try:
            seen.update(live(seed, given.clients).seen)
        except BaseException:
            print(f"seed {seed}", flush=True)
            raise
    print(dict(seen))
    print(f"{given.examples:,} simulations in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    np.seterr(over="ignore")
    _main()
