"""The replica that serves a request. Engines are replaced by the facts that decide; no devices."""

from types import SimpleNamespace

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError, EngineConfig
from ksana_jax.engine.distributed import replicas as module
from ksana_jax.engine.distributed.replicas import KnownPrefix, Replica


def request(token_ids, salt: str = ""):
    sequence = SimpleNamespace(kv=SimpleNamespace(salt=salt))
    return SimpleNamespace(prompt_token_ids=np.array(token_ids, np.int32), sequences=[sequence])


def three(*loads: int) -> list[Replica]:
    return [Replica(None, load=load) for load in (*loads, 0, 0, 0)[:3]]  # type: ignore[arg-type]  a choice asks no engine


def test_the_replica_with_the_least_work_gets_an_unknown_prompt():
    choose = KnownPrefix(block_size=4, tokens_of_step=8)
    assert [choose(three(*loads), request(range(n, n + 9))) for n, loads in enumerate(((5, 3, 9), (1, 0, 0), ()))] == [
        1,
        1,
        0,
    ]


def test_a_prompt_follows_the_longest_part_of_it_that_is_known():
    choose = KnownPrefix(block_size=4, tokens_of_step=8)
    first, longer = list(range(4)), list(range(8))
    assert choose(three(1, 0, 1), request(first)) == 1
    assert choose(three(0, 9, 9), request([*first, 70, 71, 72, 73])) == 1
    assert choose(three(0, 0, 64), request([9, 9, 9, 9])) == 0
    # The last to have served a block is taken: replica 2, after 1 had too much to do.
    assert choose(three(99, 65, 0), request(longer)) == 2
    assert choose(three(0, 0, 30), request([*longer, 5])) == 2
    assert choose(three(7, 8, 9), request([*first, 70, 71, 72, 73, 74])) == 1
    # Less than a block is no prefix, and another salt another text.
    assert choose(three(1, 0, 0), request(range(3))) == 1
    assert choose(three(0, 1, 1), request(longer, salt="other")) == 0


def test_a_known_prefix_yields_to_a_bound_of_work():
    choose = KnownPrefix(block_size=4, tokens_of_step=8)
    most = module.MOST_STEPS_AHEAD * 8
    assert choose(three(), request(range(8))) == 0
    assert choose(three(most, 0, 0), request(range(8))) == 0
    assert choose(three(most + 1, 0, 5), request(range(8))) == 1


def test_the_oldest_prefixes_are_forgotten(monkeypatch):
    monkeypatch.setattr(module, "MAX_BLOCKS", 2)
    choose = KnownPrefix(block_size=4, tokens_of_step=8)
    assert choose(three(1, 0, 1), request(range(4))) == 1
    assert choose(three(0, 1, 1), request(range(50, 58))) == 0
    assert choose(three(1, 1, 0), request(range(4))) == 2
    assert len(choose._served_by) == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size is 0"),
        (
            {
                "data_parallel_size": 2,
                "disk_cache_dir": "x",
                "enable_prefix_caching": True,
                "host_cache_bytes": 2**20,
            },
            "data_parallel_size 2 does not go with disk_cache_dir",
        ),
        (
            {
                "data_parallel_size": 2,
                "distributed": {"coordinator_address": "a:1", "num_processes": 2, "process_id": 0},
            },
            "data_parallel_size 2 does not go with distributed",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**settings)
