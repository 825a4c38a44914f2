"""The stored measurements of `experiments.gpu` and the table that is made of them."""

import json

import pytest

from experiments.gpu import measured
from experiments.gpu.computed import computed_us, modelled, names_of
from experiments.gpu.context import read_records
from pallas_kernels.speed import baseline
from pallas_kernels.speed.chip import H200


@pytest.mark.parametrize("path", [measured.README, baseline.README], ids=["experiments", "kernels"])
def test_the_readmes_have_the_tables_of_the_stored_records(path):
    text = path.read_text()
    assert measured.with_tables(text) == text


def test_the_model_of_speed_has_the_times_of_the_stored_records():
    stored = json.loads(baseline.MEASURED.read_text())
    assert stored == measured.times(measured.stored())
    assert stored["hopper attention"]["64x4k"] == 260.0
    assert "hopper kv write" not in stored  # timed with a copy


def test_rates_of_the_chip_are_those_of_the_records():
    records = [r for r in read_records(measured.RECORDS) if r["run"] <= 2]  # those that calibrated it

    def values(metric):
        found = [r["value"] for r in records if r.get("metric") == metric and r["kind"] == "value"]
        return sum(found) / len(found)

    assert H200.copy_bytes_per_s == pytest.approx(1e12 * values("copy bandwidth"), rel=1e-3)
    assert H200.product_flops == pytest.approx(1e12 * values("matmul"), rel=1e-3)
    times = measured.times(records)["hopper attention"]
    num_bytes = 2 * 8 * 128 * 2 * 32 * 4096  # keys and values of 32 rows
    assert H200.read_bytes_per_s == pytest.approx(1e6 * num_bytes / (times["64x4k"] - times["32x4k"]), rel=2e-3)


def test_a_record_has_the_predictions_of_the_kernels_that_it_timed():
    def named(metric, case, who):
        return names_of({"metric": metric, "case": case, "who": who})

    assert named("decode, blocks of 64", "1x4k", "hopper_decode") == [("hopper attention", "1x4k")]
    assert named("decode, blocks of 16", "1x4k", "hopper_decode") == [("hopper attention b=16", "1x4k")]
    assert named("decode, blocks of 16", "1x4k", "triton_decode") == [("triton decode b=16", "1x4k")]
    assert named("quantised", "64x4k", "hopper_decode, e4m3") == [("hopper attention codes=float8_e4m3fn", "64x4k")]
    assert named("quantised", "64x4k", "triton_decode, int8") == []
    assert named("kv write", "8192 tokens", "hopper, 1 tokens a block") == [("hopper kv write", "8k tokens")]
    assert named("decode, blocks of 64", "1x4k", "cuDNN paged") == named("window", "64 rows", "hopper_decode") == []
    assert len(named("products", "64 rows", "hopper, all four")) == 4
    assert named("products", "64 rows", "hopper, where it pays") == []


def test_predictions_are_of_the_device_alone_and_of_stored_shapes():
    one = {"kind": "time", "mode": "chained", "metric": "decode, blocks of 64", "case": "64x4k", "who": "hopper_decode"}
    stored = baseline.stored()["cases"]["hopper attention"]["shapes"]
    assert computed_us(one) == stored["64x4k"]["us"]
    assert computed_us(one | {"mode": "dispatched"}) is computed_us(one | {"case": "3x5k"}) is None
    products = {"kind": "time", "mode": "chained", "metric": "products", "case": "8 rows", "who": "hopper, all four"}
    assert 110 < (computed_us(products) or 0) < 130
    step = {"kind": "step", "mode": "device", "case": "64 rows of 2048, hopper"}
    assert 8000 < (computed_us(step) or 0) < 10_000 and computed_us(step | {"mode": "runner"}) is None
    assert modelled([{"name": "device", "device_kind": "NVIDIA H200"}])
    assert not modelled([{"name": "device", "device_kind": "NVIDIA H100 80GB HBM3"}])


def test_every_kernel_was_right_and_repeatable_on_the_gpu():
    checks = [r for r in read_records(measured.RECORDS) if r["kind"] == "check" and r["ours"]]
    assert {"hopper_decode", "hopper_prefill", "hopper_mass", "hopper_kv_write", "hopper_product"} <= {
        r["who"] for r in checks
    }
    assert all(r["right"] and r.get("repeatable", True) for r in checks)


def test_another_time_changes_the_table():
    records = read_records(measured.RECORDS)
    slower = [r | {"us": 2 * r["us"]} if r.get("who") == "hopper_decode" and "us" in r else r for r in records]
    assert measured.table(slower) != measured.table(records)
