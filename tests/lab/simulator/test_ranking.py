"""A fleet of light servers ranks policies as a fleet of real engines does."""

import itertools

import pytest

from ksana_jax.lab.simulator.light import LightEngine
from ksana_jax.lab.simulator.slo import percentile
from ksana_jax.serve.routing.policies import POLICIES
from tests.lab.simulator.fleets import serve, sessions

# Differences below this share are not ranked.
LEAST_DIFFERENCE = 0.05


class WithoutHits(LightEngine):
    """A light server that is wrong: it computes every prompt in full."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.cache.match = lambda chain: 0  # pyright: ignore[reportAttributeAccessIssue]


def latencies(kind, policies, num_servers, num_requests, **settings):
    """{policy: {"p50": TTFT in seconds, "p90": ...}}."""
    workload, found = sessions(num_servers, 0.9, num_requests), {}
    for policy in policies:
        requests = serve(kind, workload, num_servers, policy, **settings).requests
        found[policy] = {f"p{percent}": percentile(requests, "ttft", percent) for percent in (50, 90)}
    return found


def same_order(full, light):
    """Returns how many pairs of policies that differ by more than LEAST_DIFFERENCE are ordered alike, and how many
    there are."""
    same = pairs = 0
    for (a, b), name in itertools.product(itertools.combinations(full, 2), ("p50", "p90")):
        if abs(full[a][name] / full[b][name] - 1) > LEAST_DIFFERENCE:
            pairs += 1
            same += (full[a][name] < full[b][name]) == (light[a][name] < light[b][name])
    return same, pairs


@pytest.mark.soak
def test_every_pair_of_policies_is_ranked_like_the_full_fleet():
    """95 % of the 57 pairs. A model without prefix hits ranks 28 of them alike."""
    size = list(POLICIES), 4, 800
    full = latencies("full", *size)
    same, pairs = same_order(full, latencies("light", *size))
    assert pairs >= 50 and same >= 0.95 * pairs
    same, pairs = same_order(full, latencies("light", *size, light=WithoutHits))
    assert same < 0.7 * pairs


def test_a_small_fleet_is_ranked_like_the_full_one():
    size = ("round_robin", "min_ttft"), 2, 150
    assert same_order(latencies("full", *size), latencies("light", *size)) == (2, 2)
