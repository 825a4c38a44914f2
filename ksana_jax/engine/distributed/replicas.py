"""Several engines with one model, each on separate devices, with the methods of `Engine` that `LLM` calls.

A request goes to one engine, which serves it alone. While requests are served, each engine that has some runs in a
thread: its device computes while other threads schedule. Requests are numbered and seeded as in one engine, so
that their tokens are the same, wherever they go.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import jax

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.metrics import StepRecord
from ksana_jax.core.outputs import RequestOutput
from ksana_jax.core.request import RequestInput
from ksana_jax.engine.completion import Request
from ksana_jax.engine.engine import Engine
from ksana_jax.kv.prefix_hashing import hashes_of
from ksana_jax.sharding.placement import Placement
from ksana_jax.sharding.placing import place_on

# Blocks of prompts whose replica is remembered, and the extra work that a replica may have before a
# request whose prefix it has goes elsewhere, in steps of max_num_batched_tokens.
MAX_BLOCKS = 2**16
MOST_STEPS_AHEAD = 8


@dataclasses.dataclass(eq=False)
class Replica:
    """One engine. device: that its thread's own operations take; None for jax's default one.

    load: tokens of prompts and outputs that its unfinished requests may still compute.
    """

    engine: Engine
    device: Any = None
    load: int = 0

    @contextlib.contextmanager
    def on_device(self) -> Iterator[Engine]:
        """Gives the engine, with its device as jax's default one in this thread."""
        with contextlib.nullcontext() if self.device is None else jax.default_device(self.device):
            yield self.engine


def load_of(request: Request) -> int:
    """Returns the tokens of prompts and outputs that a new request may compute."""
    return sum(sequence.max_len for sequence in request.sequences)


class Choose(Protocol):
    """Chooses the replica of a request."""

    def __call__(self, replicas: Seq[Replica], request: Request) -> int:
        """Returns the index of a replica. Requests are asked for one after the other, in the order of their arrival."""
        ...


class KnownPrefix:
    """Chooses the replica that has served the longest part of a prompt before, or the one with the least work.

    The least work decides where none has served its first block, and where the other replica has more than
    MOST_STEPS_AHEAD steps more to do. Remembers hashes of whole blocks, the newest MAX_BLOCKS of them.
    """

    def __init__(self, block_size: int, tokens_of_step: int):
        self._block_size, self._most_ahead = block_size, MOST_STEPS_AHEAD * tokens_of_step
        self._served_by: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def __call__(self, replicas: Seq[Replica], request: Request) -> int:
        [first, *_] = request.sequences
        hashes = hashes_of(request.prompt_token_ids, self._block_size, first.kv.salt)
        least = min(range(len(replicas)), key=lambda index: replicas[index].load)
        known = next((self._served_by[found] for found in reversed(hashes) if found in self._served_by), least)
        chosen = known if replicas[known].load - replicas[least].load <= self._most_ahead else least
        for found in hashes:
            self._served_by[found] = chosen
            self._served_by.move_to_end(found)
        while len(self._served_by) > MAX_BLOCKS:
            self._served_by.popitem(last=False)
        return chosen


class Replicas:
    """Engines with one model and equal settings. Several threads may use them at once.

    Args:
      choose: of a request's replica; by default `KnownPrefix`.
    """

    def __init__(self, replicas: Seq[Replica], choose: Choose | None = None):
        self.replicas = tuple(replicas)
        first = self.replicas[0].engine
        self.choose = choose or KnownPrefix(first.config.block_size, first.config.max_num_batched_tokens)
        for replica in self.replicas[1:]:
            replica.engine.factory = first.factory  # which numbers requests and draws their seeds
        self._lock = threading.Lock()  # of loads and choices

    @property
    def engines(self) -> list[Engine]:
        return [replica.engine for replica in self.replicas]

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests."""
        return sum(len(engine.requests) for engine in self.engines)

    @property
    def records(self) -> list[StepRecord]:
        """The records of all steps, replica by replica."""
        return [record for engine in self.engines for record in engine.records]

    def each(self, function: Callable[[Engine], Any]) -> list[Any]:
        """Calls a function with one engine after the other, on its device."""
        found = []
        for replica in self.replicas:
            with replica.on_device() as engine:
                found.append(function(engine))
        return found

    def new_requests(self, asked: Seq[RequestInput]) -> list[Request]:
        """Creates requests; see `Engine.new_requests`."""
        first = self.replicas[0].engine
        taken = {name for engine in self.engines for name in list(engine.requests)}
        return first.factory.new_requests(asked, clock=first.clock, taken=taken)

    def assign(self, request: Request) -> int:
        """Chooses a request's replica and adds the request to its load; returns the replica's index."""
        with self._lock:
            index = self.choose(self.replicas, request) if len(self.replicas) > 1 else 0
            self.replicas[index].load += load_of(request)
            return index

    def release(self, index: int, load: int) -> None:
        """Subtracts ended requests from the load of their replica. load: the sum of their `load_of`."""
        with self._lock:
            self.replicas[index].load -= load

    def serve(
        self, requests: Seq[Request], report: Callable[[Request], RequestOutput] = Request.output
    ) -> Iterator[RequestOutput]:
        """Serves requests; see `Engine.serve`.

        Raises:
          Exception: a replica's failed step, which ends its requests; raised after the other replicas' requests.
        """
        shares: dict[int, list[Request]] = {}
        loads: collections.Counter[int] = collections.Counter()
        for request in requests:
            index = self.assign(request)
            shares.setdefault(index, []).append(request)
            loads[index] += load_of(request)
        news: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        stop = threading.Event()
        threads = [
            threading.Thread(target=self._serve, args=(index, share, loads[index], report, news, stop), daemon=True)
            for index, share in shares.items()
        ]
        for thread in threads:
            thread.start()
        running, failed = len(threads), None
        try:
            while running:
                index, found = news.get()
                if isinstance(found, RequestOutput):
                    yield found
                else:
                    running -= 1
                    failed = failed or found
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        if failed is not None:
            raise failed

    def _serve(
        self, index: int, share: list[Request], load: int, report: Any, news: Any, stop: threading.Event
    ) -> None:
        """Serves some requests on one replica; puts their outputs, and at the end None or an exception."""
        replica, ended = self.replicas[index], None
        try:
            with replica.on_device() as engine, contextlib.closing(engine.serve(share, report)) as outputs:  # pyright: ignore[reportArgumentType]  a generator
                for output in outputs:
                    news.put((index, output))
                    if stop.is_set():
                        break
        except BaseException as error:
            ended = error
        finally:
            self.release(index, load)
            news.put((index, ended))


def build_replicas(config: EngineConfig, build: Callable[[Placement], Engine]) -> Replicas:
    """Builds config.data_parallel_size engines, the first on jax's first devices, the next on the devices after them.

    Args:
      build: builds one engine on a placement.

    Raises:
      ConfigError: there are too few devices.
    """
    count = config.data_parallel_size
    place = functools.partial(place_on, config.tensor_parallel_size, config.num_processes, num_replicas=count)
    placements = [place(replica=index) for index in range(count)]
    if count == 1:
        return Replicas([Replica(build(placements[0]))])
    found = []
    for placement in placements:
        with jax.default_device(placement.device):
            found.append(Replica(build(placement), placement.device))
    return Replicas(found)
