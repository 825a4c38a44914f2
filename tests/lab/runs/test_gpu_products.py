"""The sections of `experiments.gpu` about products and writes, without a GPU: right candidates and wrong ones."""

from experiments.gpu.context import read_records
from experiments.gpu.sections import operators, products
from ksana_jax.models.operators import Operators
from ksana_jax.ops.fused_products import FusedOperators
from pallas_kernels import kv_write_reference, product_reference
from pallas_kernels.contract import Kernel
from tests.lab.runs.gpu_context import make_context


def test_a_layer_is_checked_and_timed_with_each_candidate(tmp_path, monkeypatch):
    def swapped(call, work, *, tuning):  # two rows change places
        out = product_reference.multiply(call)
        return out.at[:2].set(out[1::-1])

    monkeypatch.setattr(
        products,
        "candidates",
        lambda rows: {
            "XLA": (Operators(), False),
            "right": (FusedOperators(kernel=product_reference.KERNEL), True),
            "wrong": (FusedOperators(kernel=Kernel(swapped, None)), True),
        },
    )
    context = make_context(tmp_path, "products")
    products.run(context)
    records = read_records(tmp_path / "records.jsonl")
    right = {r["who"]: r["right"] for r in records if r["kind"] == "check"}
    assert right == {"XLA": True, "right": True, "wrong": False}
    times = {r["who"]: r for r in records if r["kind"] == "time"}
    assert set(times) == set(right) and all(r["us"] > 0 and r["case"] == "8 rows" for r in times.values())


def test_a_write_beside_its_slots_and_a_product_of_other_rows_are_wrong(tmp_path, monkeypatch):
    def beside(call, work, *, tuning):
        out = kv_write_reference.write(call)
        return out._replace(pool=out.pool._replace(kv=out.pool.kv.at[-1, 0].set(1)))

    def swapped(call, work, *, tuning):
        return product_reference.multiply(call)[::-1]

    def verdicts(folder):
        operators.run(make_context(folder, "operators"))
        checks = [r for r in read_records(folder / "records.jsonl") if r["kind"] == "check"]
        return {r["case"]: r["right"] for r in checks}

    (tmp_path / "right").mkdir()
    right = verdicts(tmp_path / "right")
    assert len(right) == 7 and all(right.values())
    monkeypatch.setattr(operators, "kernels", lambda: (Kernel(beside, None), Kernel(swapped, None)))
    (tmp_path / "wrong").mkdir()
    wrong = verdicts(tmp_path / "wrong")
    assert wrong.keys() == right.keys() and not any(wrong.values())
