"""`ksana bench throughput`: what is printed of two runs of the workload."""

import json

import pytest

from ksana_jax.bench import throughput
from ksana_jax.config import ConfigError

RUN = {"requests": 2, "prompt_tokens": 60, "output_tokens": 40, "seconds": 2.0, "output_tokens_per_s": 20.0}
RUN |= {"dtype": "f32", "implementation": "xla", "platform": "cpu", "compilations": 5, "warm_up_s": 1.0}
RUN |= {"compilations_after_warmup": 0, "num_blocks": 10, "block_bytes": 1000, "running": 1.5, "steps": 40}


def test_evictions_are_compared_in_a_pool_of_as_many_bytes(monkeypatch, capsys):
    def run(model, **settings):
        evicts = "kv_eviction" in settings
        asked = (settings["num_blocks"], settings.get("memory_bytes"))
        assert asked == ((None, 10_000) if evicts else (10, None))
        changed = {"num_blocks": 8, "block_bytes": 1250, "running": 6.0, "output_tokens_per_s": 50.0} if evicts else {}
        return RUN | changed | {"token_ids": []}

    monkeypatch.setattr(throughput, "run", run)
    setting = {"method": "h2o", "budget": 0.2}
    throughput.main("any", num_blocks=10, kv_eviction=setting, as_json=True)
    *_, full, evicting, times, last = capsys.readouterr().out.splitlines()
    assert full.split() == ["everything", "10", "1.50", "40", "20"]
    assert evicting.split() == ["method", "h2o,", "budget", "0.2", "8", "6.00", "40", "50"]
    assert times == "4.00 times the requests at once, 2.50 times the output tokens/s"
    found = json.loads(last)
    assert found["running"] == 1.5 and found["evicting"]["running"] == 6.0
    with pytest.raises(ConfigError, match="kv_eviction method is 'h20'"):
        throughput.main("any", kv_eviction={"method": "h20"})
