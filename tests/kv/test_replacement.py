"""Each policy's order on one worked example, and the effect of ageing."""

import dataclasses

import numpy as np
import pytest

from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.prefix_index import PrefixIndex
from ksana_jax.kv.replacement import REPLACEMENT_POLICIES, find_replacement_policy
from ksana_jax.methods.replacement import cost_aware


@dataclasses.dataclass
class Block:
    """A cached block, named by its letter."""

    name: str
    inserted: int
    last_use: int
    num_uses: int
    depth: int
    cost: float = 1.0


# Two texts that share a: a, b, c was inserted first and used often; d, e came last and were used last, once.
BLOCKS = [
    Block("a", inserted=1, last_use=9, num_uses=7, depth=0, cost=1.0),
    Block("b", inserted=1, last_use=7, num_uses=5, depth=1, cost=2.0),
    Block("c", inserted=1, last_use=7, num_uses=5, depth=2, cost=4.0),
    Block("d", inserted=6, last_use=9, num_uses=1, depth=1, cost=2.0),
    Block("e", inserted=8, last_use=8, num_uses=0, depth=2, cost=4.0),
]


def order(policy: str, age: float = 0.0) -> str:
    return "".join(b.name for b in sorted(BLOCKS, key=lambda block: find_replacement_policy(policy)(block, age)))


@pytest.mark.parametrize(
    ("policy", "first_to_last"),
    [
        ("lru", "cbeda"),
        ("lfu", "edcba"),
        ("fifo", "cbade"),
        ("newest_subtree_first", "edcba"),
        # (1 + uses) x cost: e 4, d 4 (used later), a 8, b 12, c 24.
        ("cost_aware", "edabc"),
    ],
)
def test_blocks_go_in_the_order_of_the_policy(policy, first_to_last):
    assert order(policy) == first_to_last


def test_the_newest_subtree_goes_first_whatever_was_used():
    used, old = Block("new", 9, 99, 50, 3), Block("old", 1, 1, 0, 9)
    policy = find_replacement_policy("newest_subtree_first")
    assert policy(used, 0) < policy(old, 0)
    assert find_replacement_policy("lru")(old, 0) < find_replacement_policy("lru")(used, 0)


@pytest.mark.parametrize("policy", REPLACEMENT_POLICIES)
def test_of_blocks_inserted_and_used_together_the_deepest_goes_first_or_the_cheapest(policy):
    shallow, deep = Block("a", 1, 1, 0, 0, 1.0), Block("b", 1, 1, 0, 5, 2.0)
    first = min(shallow, deep, key=lambda block: find_replacement_policy(policy)(block, 0))
    assert first is (shallow if policy == "cost_aware" else deep)


def test_what_was_once_popular_ages():
    popular = cost_aware(Block("a", 1, 1, 9, 0), age=0)
    assert popular[0] == 10
    # Each newcomer begins where the block evicted last stood, one above it: the tenth one outlives the popular block.
    age, outlived = 0.0, 0
    for time in range(2, 20):
        newcomer = cost_aware(Block("b", time, time, 0, 0), age)
        age = newcomer[0]
        outlived += newcomer > popular
    assert age == 18 and outlived == 9


def shallowest_first(block, age):
    return (block.depth,)


@pytest.mark.parametrize("spec", [shallowest_first, "tests.kv.test_replacement:shallowest_first"])
def test_a_policy_of_the_users_own_is_what_the_tiers_of_an_engine_ask(spec):
    memory = KVMemory(8, PrefixIndex(4), caching=True, replacement=spec, host_data=np.zeros((4, 1)))
    assert memory.device.policy is shallowest_first
    assert memory.host is not None and memory.host.policy is shallowest_first
