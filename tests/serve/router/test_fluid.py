"""Policies under load, in a model of servers: latency, hits and balance against the least work."""

import dataclasses
import functools

import pytest

from ksana_jax.serve.router import POLICIES
from ksana_jax.serve.workload import read_workload
from ksana_jax.serve.workload.arrivals import generator
from tests.serve.router import fluid

# Prompts and answers as in Mooncake's conversation trace: hits are 0.37 of the tokens, one block is in every prompt,
# and sessions begin in batches, every 3 s. Each server caches 1/30 of all blocks.
CONVERSATION = {"preset": "mooncake_conversation", "turns": 1.6, "hit_rate": None, "system": 512, "num_systems": 1}


@functools.cache
def conversation(num_requests, num_servers):
    made = read_workload(CONVERSATION, num_requests=num_requests).make(30_000)
    chains = fluid.prompts(made)
    made = fluid.at_load(made, num_servers, 0.8)
    items = [i if i.after is not None else dataclasses.replace(i, arrival_s=i.arrival_s // 3 * 3) for i in made.items]
    return dataclasses.replace(made, items=items), chains


@pytest.mark.parametrize("policy", POLICIES)
def test_ledger_index_and_table_are_right_at_every_event(policy):
    workload, chains = conversation(120, 3)
    fluid.run(policy, workload, chains, num_servers=3, num_blocks=300, check=True)


def test_the_earliest_first_token_beats_the_least_work_where_prompts_share():
    workload, chains = conversation(2000, 4)
    least, ours = (fluid.run(p, workload, chains, 4, 1650) for p in ("least_work", "min_ttft"))
    assert ours.p50 <= 0.70 * least.p50 and ours.p99 <= least.p99
    assert ours.hit_rate >= 1.8 * least.hit_rate


@pytest.mark.parametrize("policy", ["min_ttft", "prefix_table"])
def test_without_sharing_it_is_the_least_work(policy):
    prompts = {"kind": "synthetic", "prompt": {"p50": 7000, "p99": 60_000}, "output": 300, "rate": 1.0}
    workload = fluid.at_load(read_workload(prompts, num_requests=1500).make(30_000), 4, 0.8)
    chains = fluid.prompts(workload)
    least, ours = (fluid.run(p, workload, chains, 4, 10_000) for p in ("least_work", policy))
    assert ours.p50 == pytest.approx(least.p50, rel=0.03) and ours.p99 == pytest.approx(least.p99, rel=0.03)


@functools.cache
def one_prefix(num_requests, num_servers, load, share=0.8):
    """One prefix of 16 blocks begins 80 % of the prompts; each has 4 blocks of its own. Load counts after hits."""
    rate = load * num_servers * fluid.RATE / (4 * fluid.BLOCK + (1 - share) * 16 * fluid.BLOCK)
    setting = {"kind": "synthetic", "prompt": 20 * fluid.BLOCK, "output": 100, "rate": rate}
    workload = read_workload(setting, num_requests=num_requests).make(30_000)
    chains = fluid.prompts(workload)
    hot = chains[0][1][:16]
    chosen = generator(0, "hot").random(num_requests) < share
    return workload, [(n, [*hot, *own[16:]] if h else own) for (n, own), h in zip(chains, chosen, strict=True)]


@pytest.mark.parametrize("policy", ["min_ttft", "prefix_table"])
@pytest.mark.parametrize("num_servers", [4, 16])
def test_one_prefix_in_most_of_the_traffic_does_not_overload_its_servers(policy, num_servers):
    workload, chains = one_prefix(4000, num_servers, 0.85)
    ours = fluid.run(policy, workload, chains, num_servers, 2500)
    assert ours.skew <= 1.3 and ours.load >= 0.8
