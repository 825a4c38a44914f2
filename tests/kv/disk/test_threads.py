"""The engine asks, an inspector looks and a worker writes: three threads on one tier."""

import concurrent.futures
import threading

import numpy as np

from tests.kv.disk.blocks import chain
from tests.kv.disk.tiers import FILE, assert_books, read, write

BLOCKS = [*chain(4, "a"), *chain(3, "b"), *chain(2, "c", parent=chain(2, "a")[-1].key)]


def test_two_threads_write_read_and_look_at_will(open_tier):
    """One asks as the engine does, the other inspects; the worker is the third."""
    tier = open_tier(budget=6 * FILE, executor=None)
    stop = threading.Event()

    def look():
        while not stop.wait(0.0002):
            for key in tier.keys():
                facts = tier.facts(key)  # None where it has gone meanwhile
                assert facts is None or facts in BLOCKS

    rng, found = np.random.default_rng(1), 0
    with concurrent.futures.ThreadPoolExecutor(1) as looker:
        looking = looker.submit(look)
        try:
            for _ in range(600):
                facts = BLOCKS[rng.integers(len(BLOCKS))]
                if rng.random() < 0.5:
                    write(tier, facts)
                else:
                    found += read(tier, facts)
        finally:
            stop.set()
    looking.result()
    tier.flush()
    assert found > 50 and tier.enabled and not open_tier.told
    assert_books(tier)
