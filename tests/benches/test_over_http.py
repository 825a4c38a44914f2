"""One turn of it, with steps that compute nothing."""

from experiments.benches.over_http import HTTP, INSIDE, OverHTTP
from ksana_jax.lab.bench import core


def test_the_same_requests_are_answered_both_ways(monkeypatch):
    monkeypatch.setattr(OverHTTP, "WARM_TURN", False)
    bench = OverHTTP(step_ms=4.0, requests=6, rate=50.0, max_num_seqs=4)
    records, _ = core.run(bench, repeats=1)
    found = {label: m for label, [_, m] in zip((INSIDE, HTTP), records.done.values(), strict=True)}
    inside, over = found[INSIDE], found[HTTP]
    assert inside["num_prompt_tokens"] == over["num_prompt_tokens"]
    assert inside["num_output_tokens"] == over["num_output_tokens"] >= 6 * 64
    assert inside["ttft_p50_s"] >= 0.004 and min(inside["tpot_p50_s"], over["tpot_p50_s"]) > 0.0039
    assert "added_p50_s" not in inside and over["added_p10_s"] <= over["added_p50_s"] <= over["added_p99_s"]
    assert over["server_us"] > 0
    assert bench.processes() == [bench.server.pid]
