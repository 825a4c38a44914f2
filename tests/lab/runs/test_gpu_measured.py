"""The stored measurements of `experiments.gpu` and the table that is made of them."""

from experiments.gpu import measured
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
