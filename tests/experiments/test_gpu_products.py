"""The section of `experiments.gpu` about products, without a GPU: a right candidate and a wrong one."""

from experiments.gpu.context import read_records
from experiments.gpu.sections import products
from ksana_jax.models.operators import Operators
from ksana_jax.ops.fused_products import FusedOperators
from pallas_kernels import product_reference
from pallas_kernels.contract import Kernel
from tests.experiments.gpu_context import make_context


def test_a_layer_is_checked_and_timed_with_each_candidate(tmp_path, monkeypatch):
    def swapped(call, work, *, tuning):  # two rows change places
        out = product_reference.multiply(call)
        return out.at[:2].set(out[1::-1])

    monkeypatch.setattr(
        products,
        "candidates",
        lambda: {
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
