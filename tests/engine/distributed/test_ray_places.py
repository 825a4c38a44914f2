"""Nodes of a cluster are divided so that processes share neither GPUs nor cores."""

import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.engine.distributed.ray_places import Resources, places_of


def node(cpus, gpus=0, alive=True, name="n"):
    resources = {"CPU": float(cpus), "memory": 1e9} | ({"GPU": float(gpus)} if gpus else {})
    return {"NodeID": name, "NodeManagerHostname": name, "Alive": alive, "Resources": resources}


def found(nodes, num_cpus=None, num_gpus=None, num_devices=1):
    places = places_of(nodes, Resources(num_cpus, num_gpus), num_devices)
    return [(p.node_id, p.index, p.num_cpus, p.num_gpus, p.cores) for p in places]


def test_without_gpus_each_node_is_one_place_with_all_of_its_cpus():
    assert found([node(8, name="a"), node(64, name="b")]) == [("a", 0, 8, 0, None), ("b", 0, 64, 0, None)]


def test_each_gpu_is_a_place_with_cores_of_its_own():
    gpus = [node(17, 4, name="a"), node(64, name="without")]
    assert found(gpus) == [("a", i, 4, 1, (4 * i, 4)) for i in range(4)]
    assert found(gpus, num_devices=2) == [("a", i, 8, 2, (8 * i, 8)) for i in range(2)]


def test_a_node_without_gpus_is_used_where_none_are_asked_for():
    assert [p[0] for p in found([node(8, 1, name="a"), node(8, name="b")], num_gpus=0)] == ["a", "b"]


def test_gpus_are_hidden_from_processes_that_do_not_ask_for_any():
    both = [node(8, 1, name="a"), node(8, name="b")]
    assert [p.hides_gpus for p in places_of(both, Resources(num_gpus=0))] == [True, False]
    assert [p.hides_gpus for p in places_of(both, Resources())] == [False]


def test_as_many_places_as_the_scarcer_resource_allows():
    assert found([node(8, name="a")], num_cpus=3) == [("a", i, 3, 0, (3 * i, 3)) for i in range(2)]
    assert len(found([node(8, 4)], num_cpus=4)) == 2
    assert len(found([node(8, 2)], num_cpus=1)) == 2
    assert found([node(2, 1)], num_cpus=0.5, num_gpus=0.5) == [("n", i, 0.5, 0.5, None) for i in range(2)]


def test_cores_of_places_do_not_overlap():
    for cpus, gpus, num_cpus in ((64, 8, None), (63, 8, None), (7, 0, 2), (16, 4, 3)):
        cores = [p[4] for p in found([node(cpus, gpus)], num_cpus)]
        used = [core for first, count in cores for core in range(first, first + count)]
        assert len(used) == len(set(used)) and max(used) < cpus


def test_dead_nodes_and_heads_without_cpus_have_no_place():
    assert [p[0] for p in found([node(8, alive=False), node(0, name="head"), node(4, name="b")])] == ["b"]
    assert found([node(8, alive=False)]) == []


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({"num_cpus": 16}, "num_cpus=16 and num_gpus=0: 1 nodes, with at most 8 CPUs and 0 GPUs"),
        ({"num_gpus": 1}, "num_cpus=any and num_gpus=1: 1 nodes, with at most 8 CPUs and 0 GPUs"),
    ],
)
def test_room_for_no_process_is_an_error(settings, problem):
    with pytest.raises(ConfigError, match=f"no node of the cluster has room for a process with {problem}"):
        found([node(8)], **settings)


@pytest.mark.parametrize("settings", [{"num_cpus": -1}, {"num_gpus": float("nan")}, {"num_cpus": 1.5}, {"num_cpus": 0}])
def test_resources_that_are_none_are_refused(settings):
    with pytest.raises(ConfigError, match=r"^num_[cg]pus is "):
        Resources(**settings)
