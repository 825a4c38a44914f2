"""Blocks of a small format, and executors that run a tier's worker in the test's own thread."""

from __future__ import annotations

import concurrent.futures
import hashlib

import numpy as np

from ksana_jax.kv.disk.block_file import BlockFacts, BlockFormat
from ksana_jax.kv.layout import Leaf

SHAPE = (2, 2, 3, 4)
FORMAT = BlockFormat("a model", (Leaf("kv", SHAPE, "float32"),))
BF16 = BlockFormat("a model", (Leaf("kv", SHAPE, "bfloat16"),))
QUANTISED = BlockFormat("m", (Leaf("kv", (5,), "int8"), Leaf("scale", (3,), "float16")), "kivi4")
ROOT = b"\x00" * 32


def chain(count: int, name: str = "a", parent: bytes = ROOT) -> list[BlockFacts]:
    """Facts of the blocks of a text, each continuing the previous one."""
    blocks = []
    for number in range(count):
        tokens = np.frombuffer(hashlib.sha256(f"{name}{number}".encode()).digest()[:16], np.int32).tobytes()
        key = hashlib.sha256(parent + tokens).digest()
        blocks.append(BlockFacts(key, parent, tokens, 4 * number))
        parent = key
    return blocks


def data_of(facts: BlockFacts, format: BlockFormat = FORMAT, generation: int = 0) -> np.ndarray:
    """A block's keys and values: any bits, not-a-numbers among them."""
    seed = int.from_bytes(hashlib.sha256(facts.key + b"%d" % generation).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, format.nbytes, np.uint8)


def blank(format: BlockFormat = FORMAT) -> np.ndarray:
    return np.full(format.nbytes, 0xAB, np.uint8)


class AtOnce(concurrent.futures.Executor):
    """Runs each task when it is submitted."""

    def submit(self, fn, /, *args, **kwargs):
        future = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class Later(concurrent.futures.Executor):
    """Runs tasks in order, on demand."""

    def __init__(self):
        self.tasks = []

    def submit(self, fn, /, *args, **kwargs):
        future = concurrent.futures.Future()
        self.tasks.append((future, fn, args, kwargs))
        return future

    def run(self):
        while self.tasks:
            future, fn, args, kwargs = self.tasks.pop(0)
            future.set_result(fn(*args, **kwargs))
