"""Times of cached blocks: from a listener's events, and in /metrics."""

import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.tier import DEVICE, HOST, Node
from ksana_jax.serve.server.block_times import BlockTimes
from ksana_jax.serve.server.settings import ServerSettings
from tests.serve.server.serving import make_llm, serving

LIFE, IDLE, GAP = "kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def live(
    times: BlockTimes, clock: Clock, stored: float, uses: list[float], dropped: float, level: int = DEVICE
) -> None:
    node = Node(b"", None, b"", 0)
    clock.now = stored
    times.stored(node, level)
    for clock.now in uses:
        times.used(node)
    clock.now = dropped
    times.dropped(node, level)


def sums(times: BlockTimes) -> dict[str, tuple[int, float]]:
    return {name: (histogram.count, histogram.sum) for name, histogram in times.histograms.items()}


def test_the_times_of_a_block_that_is_used_again_and_replaced():
    clock = Clock()
    times = BlockTimes(1.0, clock)
    live(times, clock, 10, [11, 14], 20)
    assert sums(times) == {LIFE: (1, 10), IDLE: (1, 6), GAP: (1, 3)}
    live(times, clock, 30, [], 32)
    assert sums(times) == {LIFE: (2, 12), IDLE: (2, 8), GAP: (1, 3)}
    live(times, clock, 40, [41, 51, 52, 54, 57], 58)  # the first use is forgotten
    assert sums(times) == {LIFE: (3, 30), IDLE: (3, 9), GAP: (4, 9)}
    live(times, clock, 60, [61, 62], 63, HOST)
    assert times.histograms[LIFE].count == 3 and not times._blocks


def test_blocks_lost_with_a_failed_step_have_no_say():
    times, node = BlockTimes(1.0), Node(b"", None, b"", 0)
    times.stored(node, DEVICE)
    times.cleared()
    times.dropped(node, DEVICE)
    assert times.histograms[LIFE].count == 0


def test_a_sample_of_the_blocks_is_followed():
    clock = Clock()
    times = BlockTimes(0.2, clock)
    for _ in range(5000):
        live(times, clock, 0, [], 1)
    assert 800 < times.histograms[LIFE].count < 1200  # 7 standard deviations


@pytest.mark.parametrize("on", [True, False])
def test_the_metrics_of_a_server_whose_pool_is_small(on):
    with serving(make_llm(num_blocks=40), kv_cache_metrics=on, kv_cache_metrics_sample=1.0) as server:
        server.post("/v1/completions", prompt="the same again", max_tokens=4)
        server.post("/v1/completions", prompt="the same again", max_tokens=4)
        for number in range(12):
            server.post("/v1/completions", prompt=f"another {number:02} " * 3, max_tokens=4)
        text = server.ask("GET", "/metrics").body.decode()
        counters = server.llm.engine.memory.counters
        assert counters.replaced > 10 and counters.hits_device > 0
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if "kv_block" in line and line[0] != "#")
    of_engine = '{engine="0",model_name="ksana"}'
    if not on:
        assert not lines and not server.llm.engine.memory.listeners
        return
    assert {float(lines[f"vllm:{name}_count{of_engine}"]) for name in (LIFE, IDLE)} == {counters.replaced}
    assert float(lines[f"vllm:{LIFE}_sum{of_engine}"]) >= float(lines[f"vllm:{IDLE}_sum{of_engine}"]) > 0


@pytest.mark.parametrize("sample", [0, -1, 1.5, "all"])
def test_samples_out_of_range_are_refused(sample):
    with pytest.raises(ConfigError, match="kv_cache_metrics_sample"):
        ServerSettings(kv_cache_metrics_sample=sample)
