"""Predicted against measured memory of a whole process, which therefore has to be one of its own."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = {"--max-num-seqs": 2, "--max-model-len": 128, "--max-num-batched-tokens": 32, "--rounds": 4}


pytestmark = pytest.mark.soak
IN_PROC = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")


def measure():
    args = [str(part) for pair in SETTINGS.items() for part in pair]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.benches.peak_memory", "ksana-tiny", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def measured():
    return measure()


# What XLA's compiler takes varies by 80 MiB from run to run, a fifth of this process.
@IN_PROC
def test_the_peak_of_the_process_is_predicted_within_20_percent(measured):
    assert abs(measured["peak_error"]) <= 0.20, measured


@IN_PROC
def test_the_median_of_three_peaks_is_predicted_within_10_percent(measured):
    errors = [found["peak_error"] for found in (measured, measure(), measure())]
    assert abs(statistics.median(errors)) <= 0.10, errors


def test_weights_pool_and_step_are_predicted_to_the_byte(measured):
    for name in ("weights", "pool", "step"):
        assert measured[name]["predicted"] == measured[name]["measured"], name


@IN_PROC
def test_the_peak_does_not_grow_with_the_requests_served(measured):
    after_warm_up, *rounds = measured["peak_after_rounds"]
    # The first round meets memory that warming up does not: the first results of each program, threads of the device.
    assert rounds[0] - after_warm_up < 0.05 * after_warm_up
    # From then on there is only what Python's and the C library's allocators keep of small things: below 1 %.
    assert rounds[-1] - rounds[0] < 0.01 * rounds[0]
