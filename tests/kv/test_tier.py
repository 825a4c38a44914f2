"""The next cached block to replace: by policy, leaves before parents, never an owned one."""

import numpy as np
import pytest

from ksana_jax.kv.replacement import REPLACEMENT_POLICIES, find_replacement_policy
from ksana_jax.kv.tier import DEVICE, HOST, NOWHERE, Node, Tier
from ksana_jax.methods.replacement import lru


class Tree:
    """A tier, and nodes by name; time passes with every call."""

    def __init__(self, num_blocks: int = 16, policy=lru):
        self.tier = Tier(DEVICE, num_blocks, 4, policy)
        self.nodes: dict[str, Node] = {}
        self.now = 0

    def put(self, name: str, parent: str | None = None, cost: float = 1.0) -> Node:
        """A node in a separate block, which is owned until `release`."""
        self.now += 1
        above = self.nodes.get(parent) if parent else Node(b"root", None, b"", -1)
        node = Node(name.encode(), above, b"", above.depth + 1, cost, self.now, self.now, known=True)
        self.nodes[name] = node
        self.tier.put(node, int(self.tier.pool.allocate(1)[0]))
        return node

    def release(self, *names: str) -> None:
        self.tier.release(np.array([self.nodes[n].at[DEVICE] for n in names], np.int32))

    def use(self, *names: str) -> None:
        """Found again, and let go at once."""
        self.now += 1
        ids = np.array([self.nodes[n].at[DEVICE] for n in names], np.int32)
        self.tier.pool.share(ids)
        for name in names:
            self.nodes[name].last_use, self.nodes[name].num_uses = self.now, self.nodes[name].num_uses + 1
        self.tier.release(ids)

    def evict(self) -> str | None:
        node = self.tier.victim()
        if node is None:
            return None
        self.tier.drop(node)
        self.tier.check()
        return node.key.decode()

    def evict_all(self) -> str:
        return "".join(iter(self.evict, None))


def test_leaves_go_before_their_parents_though_they_were_used_later():
    tree = Tree()
    for name, parent in [("a", None), ("b", "a"), ("c", "b"), ("d", "a")]:
        tree.put(name, parent)
    tree.release(*"abcd")
    tree.use("c")
    tree.tier.check()
    # b is older than all leaves, but c stands on it.
    assert tree.evict_all() == "dcba"
    assert tree.tier.pool.num_free == 16 and tree.tier.pool.num_idle == 0


def test_where_patterns_evict_parents_may_go_first():
    tree = Tree()
    tree.tier.set_leaves_first([False])
    for name, parent in [("a", None), ("b", "a"), ("c", "b")]:
        tree.put(name, parent)
    tree.release(*"abc")
    assert tree.evict_all() == "abc"


def test_the_choice_of_who_may_go_can_change_while_blocks_are_cached():
    tree = Tree()
    for name, parent in [("a", None), ("b", "a"), ("c", "b"), ("d", "c")]:
        tree.put(name, parent)
    tree.release(*"abcd")
    tree.tier.set_leaves_first([False])
    tree.tier.check()
    assert tree.evict() == "a"
    tree.tier.set_leaves_first([True])
    tree.tier.check()
    assert tree.evict_all() == "dcb"


def test_an_owned_block_is_never_evicted():
    tree = Tree()
    for name, parent in [("a", None), ("b", "a"), ("c", None)]:
        tree.put(name, parent)
    assert tree.evict() is None
    tree.release("a", "c")
    # a has no owner, but b stands on it and is held: c goes, and then a rather than nothing.
    assert tree.evict_all() == "ca"
    tree.release("b")
    assert tree.evict_all() == "b"


def test_a_block_that_is_owned_again_is_passed_over():
    tree = Tree()
    for name in "abc":
        tree.put(name)
    tree.release(*"abc")
    tree.tier.pool.share(np.array([tree.nodes["a"].at[DEVICE]], np.int32))
    assert tree.evict_all() == "bc"
    tree.release("a")
    assert tree.evict_all() == "a"


def test_use_changes_the_order():
    tree = Tree()
    for name in "abc":
        tree.put(name)
    tree.release(*"abc")
    tree.use("a")
    tree.use("b")
    tree.use("a")
    assert tree.evict_all() == "cba"


def test_a_priority_may_change_without_an_owner():
    """As of a slot of the host whose content is found on the device."""
    tree = Tree()
    for name in "ab":
        tree.put(name)
    tree.release(*"ab")
    tree.nodes["a"].last_use = 99
    tree.tier.touch(tree.nodes["a"])
    tree.tier.check()
    assert tree.evict_all() == "ba"


def test_what_is_not_here_is_not_considered_when_it_is_used():
    tree = Tree()
    elsewhere = Node(b"x", None, b"", 0)
    tree.tier.touch(elsewhere)
    assert tree.evict() is None and elsewhere.at == [NOWHERE, NOWHERE]


@pytest.mark.parametrize("policy", REPLACEMENT_POLICIES)
def test_victims_come_in_the_order_of_the_policy(policy):
    """Against sorting at each turn, over random trees."""
    rng = np.random.default_rng(7)
    tree = Tree(64, find_replacement_policy(policy))
    names = [chr(0x4E00 + i) for i in range(40)]
    for at, name in enumerate(names):
        parent = names[rng.integers(at)] if at and rng.random() < 0.7 else None
        tree.put(name, parent, cost=float(rng.integers(1, 5)))
    tree.release(*names)
    for _ in range(60):
        tree.use(*rng.choice(names, 2, replace=False).tolist())
    left, entered, age = set(names), {}, 0.0
    while left:
        parents = {tree.nodes[n].parent.key.decode() for n in left}
        for name in left - parents - set(entered):  # leaves, from now on
            entered[name] = find_replacement_policy(policy)(tree.nodes[name], age)
        gone = tree.evict()
        assert entered[gone] == min(entered.values())
        age = entered.pop(gone)[0]
        left.remove(gone)


def test_ageing_rises_to_the_priority_of_the_block_evicted_last():
    tree = Tree(policy=find_replacement_policy("cost_aware"))
    for name, cost in [("a", 3.0), ("b", 5.0)]:
        tree.put(name, cost=cost)
    tree.release(*"ab")
    assert tree.tier.age == 0 and tree.evict() == "a" and tree.tier.age == 3
    tree.put("c", cost=1.0)
    tree.release("c")  # 3 + 1 is below b's 5
    tree.put("d", cost=2.5)
    tree.release("d")  # 3 + 2.5 is above it
    assert tree.evict_all() == "cbd"


def test_the_heap_stays_bounded_however_often_blocks_are_used():
    tree = Tree()
    for name in "abcd":
        tree.put(name)
    tree.release(*"abcd")
    for turn in range(2000):
        tree.use("abcd"[turn % 4])
        assert len(tree.tier._heap) <= 4 * 4 + 64 + 1
    tree.tier.check()
    assert tree.evict_all() == "abcd"


def test_a_dropped_node_is_nowhere_here_and_counts_no_longer_as_a_child():
    tree = Tree()
    a, b = tree.put("a"), tree.put("b", "a")
    assert a.num_children_at == [1, 0]
    block = b.at[DEVICE]
    tree.tier.drop(b)
    assert b.at == [NOWHERE, NOWHERE] and a.num_children_at == [0, 0] and block not in tree.tier.node_of
    # It is still owned, and free when its owner leaves.
    assert tree.tier.pool.num_free == 14
    tree.tier.release(np.array([block], np.int32))
    assert tree.tier.pool.num_free == 15


def test_a_parent_whose_child_lies_in_another_tier_is_a_leaf_here():
    tree = Tree()
    a = tree.put("a")
    host = Tier(HOST, 4, 4, lru)
    host.put(Node(b"b", a, b"", 1, known=True), int(host.pool.allocate(1)[0]))
    assert a.num_children_at == [0, 1]
    tree.release("a")
    assert tree.evict() == "a"


@pytest.mark.parametrize("harm", ["unknown", "elsewhere", "forgotten", "not kept"])
def test_check_sees_books_that_are_wrong(harm):
    tree = Tree()
    tree.put("a"), tree.put("b")
    tree.release("a", "b")
    tree.tier.check()
    if harm == "unknown":
        tree.nodes["a"].known = False
    elif harm == "elsewhere":
        tree.nodes["a"].at[DEVICE] = 9
    elif harm == "forgotten":
        tree.tier._heap.clear()
    else:
        tree.tier.pool.forget(tree.nodes["a"].at[DEVICE])
    with pytest.raises(AssertionError):
        tree.tier.check()
