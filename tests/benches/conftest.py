import pytest

from ksana_jax.lab.bench import bounds, throughput
from ksana_jax.lab.bench.bounds import Rates, WorkBound
from tests.benches.fakes import FakeLLM


@pytest.fixture
def engines(monkeypatch):
    """Engines that are asked for, whose runs take 2 s, or 1 s with evictions and 1.6 s with steps together, and bounds
    of 1/4 s a request."""
    made = []

    def make_llm(model, **settings):
        made.append(settings)
        return FakeLLM(settings.get("num_blocks") or 8, settings.get("num_scheduler_steps", 1))

    def run(llm, prompts, lengths):
        evicts = llm.num_blocks == 8
        found = {"num_blocks": llm.num_blocks, "running": 6.0 if evicts else 1.5, "steps": 40}
        return 1.0 if evicts else 1.6 if llm.steps > 1 else 2.0, [[1]] * len(prompts), found

    monkeypatch.setattr("ksana_jax.lab.bench.latency.make_llm", make_llm)
    monkeypatch.setattr(throughput, "run", run)
    monkeypatch.setattr(bounds, "measure_rates", lambda dtype, num_bytes: Rates(1.0, 1.0))
    monkeypatch.setattr(
        bounds, "work_of", lambda model, dtype, prompts, outputs, weights_bytes: WorkBound(len(prompts) / 4, 0.25)
    )
    return made
