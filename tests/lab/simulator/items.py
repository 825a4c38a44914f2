"""Workloads and engines for tests of the simulator."""

import dataclasses

import numpy as np

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.serve.workload.items import WorkItem

MODEL = ModelConfig(vocab_size=1000, eos_ids=(2,))


def item(index: int, arrival_s: float, num_prompt: int, num_output: int, max_tokens: int = 64, seed=None, **others):
    """A request with drawn tokens; equal seeds give equal tokens."""

    def drawn(what: int, count: int):
        return lambda: np.random.default_rng((index if seed is None else seed, what)).integers(0, 1000, count, np.int32)

    return WorkItem(
        index, arrival_s, num_prompt, num_output, max_tokens, drawn(0, num_prompt), drawn(1, num_output), **others
    )


def config(**settings) -> EngineConfig:
    return EngineConfig(**{"num_blocks": 64, "max_model_len": 128, "max_num_seqs": 4, **settings})


def drawn_items(count: int, rate: float, seed: int = 0, texts: int | None = None) -> list[WorkItem]:
    """Poisson arrivals; texts: how many different ones there are, None for all different."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    lengths = zip(rng.integers(1, 60, count), rng.integers(1, 40, count), strict=True)
    return [
        item(i, float(at), int(n), int(m), seed=None if texts is None else i % texts)
        for i, (at, (n, m)) in enumerate(zip(arrivals, lengths, strict=True))
    ]


def replaced(items: list[WorkItem], **fields) -> list[WorkItem]:
    return [dataclasses.replace(one, **fields) for one in items]
