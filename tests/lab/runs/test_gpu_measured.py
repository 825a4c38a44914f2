"""The stored measurements of `experiments.gpu`, the table that is made of them, and kernels that others have timed."""

import pytest

from experiments.gpu import measured, others
from experiments.gpu.context import read_records


def test_the_readme_has_the_tables_of_the_stored_records():
    text = measured.README.read_text()
    assert measured.with_tables(text) == text


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


def test_every_figure_has_a_device_a_case_a_name_and_one_unit():
    for kernel in others.read()["kernels"]:
        assert kernel["device"] in others.read()["data_sheet_bytes_per_s"]
        assert kernel["case"] and kernel["who"]
        assert len(kernel.keys() & {"us", "share", "tflops", "of_16_bits"}) == 1, kernel


def test_figures_are_physically_possible():
    sheet = others.read()["data_sheet_bytes_per_s"]
    for kernel in others.read()["kernels"]:
        if "us" in kernel:
            *kind, case = kernel["case"].split(", ")
            rows, context = case.split("x")
            tokens = int(rows) * int(context.replace("k", "")) * (1024 if "k" in context else 1)
            # A latent has 576 numbers of two bytes; with one row, or 128 heads, bytes are not the bound.
            num_bytes, least = (1152, 0.2) if kind else (others.TOKEN_BYTES, 0.4)
            rate = tokens * num_bytes / kernel["us"] * 1e6
            assert least < rate / sheet[kernel["device"]] < 1


def test_the_best_figure_is_the_least_time_and_the_most_of_a_bandwidth():
    assert others.best("H200", "64x8k", "us") == (483.7, "SGLang 0.5.14, FlashAttention 3")
    assert others.best("H100", "256x512", "share") == (0.84, "TensorRT-LLM")
    assert others.best("H100", "32x4k", "share") is None


def test_the_table_says_where_ours_is_behind():
    records = read_records(measured.RECORDS)

    def behind(records, begin):
        [line] = [line for line in others.table(records).splitlines() if line.startswith(f"| {begin}")]
        return float(line.split(" | ")[-2])

    assert behind(records, "decode 256x512") < 1 < behind(records, "decode 64x8k")
    twice = [r | {"us": 2 * r["us"]} if r["kind"] == "time" else r for r in records]
    for begin in ("decode 64x8k", "decode 1x32k", "prefill"):
        assert behind(twice, begin) == pytest.approx(2 * behind(records, begin), abs=0.02)
