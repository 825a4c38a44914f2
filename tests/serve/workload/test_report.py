"""Figures of served requests, computed by hand."""

import json
import math

import pytest

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.simulator.cost import AffineCost
from ksana_jax.lab.simulator.run import simulate
from ksana_jax.serve.workload import read_workload
from ksana_jax.serve.workload.report import LatencyLimits, RequestTimes, flat, spread, summarise, table

# Answered in 1 s, then 3 tokens in 2 s; answered at once with one token; never answered; refused.
ALL = [
    RequestTimes(0, 10.0, 11.0, 13.0, num_prompt=30, num_output=3, num_cached_tokens=10, gaps_s=(0.5, 1.5)),
    RequestTimes(1, 11.0, 11.5, 11.5, num_prompt=10, num_output=1),
    RequestTimes(2, 12.0, num_prompt=8),
    RequestTimes(3, 14.0, num_prompt=8, error="429 queue_full"),
]


def test_the_times_of_a_request():
    one, single, open_, refused = ALL
    assert (one.ttft_s, one.tpot_s, one.e2e_s) == (1.0, 1.0, 3.0)
    assert math.isnan(single.tpot_s) and single.e2e_s == 0.5
    assert [r.finished for r in ALL] == [True, True, False, False]
    assert math.isnan(open_.ttft_s) and math.isnan(refused.e2e_s)


def test_a_summary_counts_what_has_finished_and_names_the_rest():
    found = summarise(ALL, LatencyLimits(ttft_s=0.6))
    assert (found["num_requests"], found["num_finished"], found["num_failed"]) == (4, 2, 1)
    assert found["errors"] == {"429 queue_full": 1} and found["seconds"] == 4.0
    assert (found["requests_per_s"], found["output_tokens_per_s"], found["prompt_tokens_per_s"]) == (0.5, 1.0, 10.0)
    assert found["hit_rate"] == 0.25 and found["mean_concurrency"] == pytest.approx(3.5 / 4)
    assert found["ttft_s"] == {"mean": 0.75, "p50": 0.75, "p90": 0.95, "p99": 0.995, "max": 1.0}
    assert found["tpot_s"]["max"] == 1.0 and found["itl_s"]["mean"] == 1.0
    assert found["goodput"] == {"limits": {"ttft_s": 0.6}, "share": 0.25, "requests_per_s": 0.25}
    assert found["failures"] == [
        "1 of 4 requests failed: 429 queue_full (1)",
        "1 of 4 requests did not end",
    ]
    json.dumps(found, allow_nan=False)


def test_a_run_in_which_nothing_ended_has_no_figures():
    found = summarise(ALL[2:3])
    assert found["ttft_s"] is None and found["requests_per_s"] is None and found["hit_rate"] is None
    assert json.loads(json.dumps(summarise([]), allow_nan=False))["num_requests"] == 0
    assert "0 of 1 finished" in table(found) and "did not end" in table(found)


def test_a_growing_queue_is_a_failure():
    def run(waits):
        return summarise([RequestTimes(i, float(i), i + w, i + w + 1, 8, 2) for i, w in enumerate(waits)])["failures"]

    assert run([0.1] * 20) == [] and run([0.1] * 10 + [0.12] * 10) == []
    assert run([0.1 * i for i in range(20)]) == [
        "the queue grows: mean TTFT 0.45 s in the first half, 1.45 s in the second"
    ]
    # Of requests that come at once, the last ones wait the longest.
    assert summarise([RequestTimes(i, 0.0, float(i), i + 1.0, 8, 2) for i in range(20)])["failures"] == []
    # Twice a fraction of a millisecond is noise.
    assert run([1e-4] * 10 + [2e-4] * 10) == []


def test_all_limits_must_be_met():
    limits = LatencyLimits.read("ttft=1, tpot=0.9,e2e=5")
    assert limits == LatencyLimits(1.0, 0.9, 5.0) and LatencyLimits.read("") is None
    assert [limits.met_by(r) for r in ALL] == [False, True, False, False]
    assert LatencyLimits(ttft_s=1.0, tpot_s=1.0).met_by(ALL[0])


@pytest.mark.parametrize(
    "text, message",
    [
        ("tfft=1", "no limit 'tfft'; the nearest of ttft, tpot, e2e is 'ttft'"),
        ("ttft", "ttft is '', must be a number of seconds"),
        ("ttft=-1", "ttft is -1.0, must be a finite number above 0"),
        ("ttft=nan", "ttft is nan, must be"),
    ],
)
def test_a_wrong_limit_is_named(text, message):
    with pytest.raises(ConfigError, match=message):
        LatencyLimits.read(text)


def test_numbers_have_one_key_each():
    found = flat(summarise(ALL, LatencyLimits(ttft_s=0.6)))
    assert found["ttft_p99_s"] == 0.995 and found["goodput_share"] == 0.25 and found["errors_429 queue_full"] == 1
    assert all(isinstance(value, (int, float)) for value in found.values())


def test_the_table_has_the_figures_in_milliseconds():
    text = table(summarise(ALL, LatencyLimits(ttft_s=0.6)))
    assert "2 of 4 finished in 4.00 s; 429 queue_full: 1" in text and "25.0% of the requests meet TTFT 0.6 s" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["ms"] == ["mean", "p50", "p90", "p99", "max"]
    assert rows["TTFT"] == ["750.0", "750.0", "950.0", "995.0", "1,000.0"]
    assert "warning: 1 of 4 requests did not end" in text and all(len(line) < 120 for line in text.splitlines())


def test_values_that_do_not_exist_are_left_out():
    assert spread([math.nan, 2.0])["mean"] == 2.0 and spread([math.nan]) is None


def test_a_simulation_fills_the_report_of_a_benchmark():
    workload = read_workload("synthetic", num_requests=30, rate=20.0, prompt=[8, 40], output=[2, 9]).make(1000)
    config = EngineConfig(num_blocks=64, max_model_len=128, max_num_seqs=4)
    run = simulate(workload.items, ModelConfig(vocab_size=1000, eos_ids=(2,)), config, AffineCost(0.01, 1e-4))
    limits = LatencyLimits(ttft_s=1.0)
    found = run.report(limits)
    assert found.keys() > summarise([], limits).keys() and found["errors"] == {}
    assert found["num_finished"] == 30 and found["goodput"]["share"] == 1.0
    assert found["num_output_tokens"] == sum(item.num_output for item in workload.items)
    assert "30 of 30 finished" in table(found)
