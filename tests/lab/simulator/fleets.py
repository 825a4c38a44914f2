"""Fleets of simulated servers for tests."""

from __future__ import annotations

import functools
from typing import Any

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.lab.simulator import fleet
from ksana_jax.lab.simulator.chains import Chains
from ksana_jax.lab.simulator.cost import AffineCost, Cost
from ksana_jax.lab.simulator.one_engine import SimEngine
from ksana_jax.serve.router.router import Router
from ksana_jax.serve.router.settings import RouterSettings
from ksana_jax.serve.workload import read_workload
from ksana_jax.serve.workload.items import Workload
from tests.serve.router.invariants import check_router

MODEL = ModelConfig(vocab_size=32_000, eos_ids=(2,), max_position=16_384)
CONFIG = EngineConfig(
    block_size=64, num_blocks=768, max_num_seqs=64, max_num_batched_tokens=2048, enable_prefix_caching=True
)
COST = AffineCost(0.010, 0.0001, 1e-9)


def sessions(num_servers: int, load: float, num_requests: int, **settings: Any) -> Workload:
    """Conversations that share system prompts; a load of 1 keeps servers about two thirds busy."""
    given = {
        "kind": "sessions",
        "num_requests": num_requests,
        "rate": 4.0 * load * num_servers,
        "think_s": 5.0,
        "num_systems": 10 * num_servers,
        "system": 1024,
        "user": {"p50": 200, "p99": 2000},
        "output": {"p50": 100, "p99": 600},
    }
    return read_workload(given | settings).make(MODEL.vocab_size)


def serve(
    workload: Workload,
    num_servers: int,
    policy: Any,
    config: EngineConfig = CONFIG,
    seed: int = 0,
    cost: Cost = COST,
):
    """Serves a workload on a fleet."""
    chains = Chains(config.block_size)
    assert config.num_blocks is not None
    settings = RouterSettings(config.block_size, 9300, pool_tokens=config.num_blocks * config.block_size)
    router = Router(range(num_servers), policy, settings, seed)
    run = fleet.serve(workload.items, functools.partial(SimEngine, MODEL, config, cost=cost), router, chains)
    check_router(router)
    return run
