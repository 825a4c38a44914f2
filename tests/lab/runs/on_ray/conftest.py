"""A Ray cluster of two nodes with one CPU each, and this process as its driver. `test_on_ray.py` runs it."""

import os

import pytest

collect_ignore_glob = [] if "KSANA_TEST_RAY" in os.environ else ["test_*.py"]
NODE = {"num_cpus": 1, "node_ip_address": "127.0.0.1"}


class Nodes:
    """The cluster. FLAG: what XLA_FLAGS of the second node has; the default, so that it changes nothing but records."""

    FLAG = "--xla_cpu_enable_fast_math=false"

    def __init__(self):
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})

    @property
    def address(self):
        return self.cluster.address

    def add_second(self):
        self._second = self.cluster.add_node(**NODE, env_vars={"XLA_FLAGS": self.FLAG})

    def replace_second(self):
        """Ends the second node with all of its processes, and adds another one."""
        self.cluster.remove_node(self._second, allow_graceful=False)
        self.add_second()


@pytest.fixture(scope="session")
def nodes():
    made = Nodes()
    yield made
    made.cluster.shutdown()


@pytest.fixture(scope="session")
def ray(nodes):
    from ksana_jax.engine.distributed.ray_connection import connected

    with connected(nodes.address) as module:
        nodes.add_second()  # not before: a driver connects to the last node on its machine, and ends with it
        yield module
