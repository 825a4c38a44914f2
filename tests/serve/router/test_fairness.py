"""Fairness between clients: virtual token counters."""

import collections
import queue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana_jax.serve.router.fairness import FairQueue


def popped(queue, count, cost=100):
    found = []
    for _ in range(count):
        client, _item = queue.pop()
        queue.charge(client, num_input=cost)
        found.append(client)
    return found


def test_the_client_that_was_served_least_is_next():
    q = FairQueue()
    for n in range(6):
        q.push("greedy", n)
    q.push("modest", "a")
    q.push("modest", "b")
    assert popped(q, 8) == ["greedy", "modest", "greedy", "modest"] + ["greedy"] * 4
    assert q.pop() is None and not len(q)


def test_requests_of_one_client_stay_in_order_and_may_be_removed():
    q = FairQueue()
    items = [object() for _ in range(4)]
    for item in items:
        q.push("a", item)
    assert q.remove("a", items[1]) and not q.remove("a", items[1]) and not q.remove("b", items[0])
    assert [q.pop()[1] for _ in range(3)] == [items[0], items[2], items[3]] and q.pop() is None


def test_output_counts_twice_as_much():
    q = FairQueue()
    for n in range(3):
        q.push("writer", n)
        q.push("reader", n)
    q.charge("writer", num_output=100)
    q.charge("reader", num_input=150)
    assert popped(q, 4) == ["reader", "writer", "reader", "writer"]


def test_a_client_that_comes_back_has_saved_up_nothing():
    q = FairQueue()
    for n in range(100):
        q.push("steady", n)
    popped(q, 60)
    for n in range(40):
        q.push("returns", n)
    assert collections.Counter(popped(q, 40)) == {"steady": 20, "returns": 20}
    popped(q, 40)
    assert not len(q)
    # An empty queue lifts to the client that left last.
    q.push("third", 0)
    assert q.counter("third") >= 5900


def test_a_full_queue_refuses_until_there_is_room():
    q = FairQueue(max_queued=2)
    q.push("a", 1)
    q.push("b", 2)
    with pytest.raises(queue.Full, match="2 requests wait, at most 2 may"):
        q.push("c", 3)
    assert q.pop() == ("a", 1) and len(q) == 1
    q.push("c", 3)


def test_clients_that_have_gone_are_forgotten():
    q = FairQueue()
    for n in range(20_000):
        q.push(f"client {n}", n)
        popped(q, 1)
    assert len(q._counters) < 3000


@settings(max_examples=60, deadline=None)
@given(
    inputs=st.lists(st.integers(1, 60), min_size=2, max_size=12),
    outputs=st.lists(st.integers(1, 40), min_size=2, max_size=12),
    capacity=st.integers(100, 400),
)
def test_service_of_backlogged_clients_differs_by_no_more_than_the_bound(inputs, outputs, capacity):
    """Two clients always have requests waiting: "a" short ones, "b" those given. A batch holds `capacity` tokens."""
    q, running, served = FairQueue(), [], {"a": 0.0, "b": 0.0}
    bound = max(1.0 * max(inputs), 2.0 * capacity)
    numbers = dict.fromkeys("ab", 0)

    def ask(client):
        n = numbers[client]
        numbers[client] += 1
        shape = (5, 5) if client == "a" else (inputs[n % len(inputs)], outputs[n % len(outputs)])
        q.push(client, shape)

    def serve(client, num_input=0, num_output=0):
        q.charge(client, num_input, num_output)
        served[client] += num_input + 2 * num_output

    for client in "ab":
        for _ in range(200):
            ask(client)
    history = [dict(served)]
    for _ in range(400):
        while sum(n + m for _, n, m, _ in running) + 100 <= capacity:
            client, (num_input, num_output) = q.pop()
            ask(client)
            running.append([client, num_input, num_output, 0])
            serve(client, num_input)
        for row in running:
            row[3] += 1
            serve(row[0], num_output=1)
        running = [row for row in running if row[3] < row[2]]
        assert abs(q.counter("a") - q.counter("b")) <= bound
        history.append(dict(served))
    gap = [h["a"] - h["b"] for h in history]
    assert max(gap) - min(gap) <= 2 * bound
