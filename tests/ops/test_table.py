"""The table of operators beside the choice of an engine."""

from ksana_jax.ops.table import operator_table
from tests.engine.small import make_llm


def test_the_table_says_what_an_engine_takes():
    llm = make_llm(operators={"attention": "xla", "linear": "xla", "norm": "xla"}, programs={})
    rows = operator_table(llm.model_config, llm.runner.requirements, "float32", llm.config.operators)
    used = {row.operator: row.name for row in rows if row.used}
    assert used == dict.fromkeys(("attention", "kv_write", "linear", "norm", "sampling"), "xla")
    assert all(row.unsupported or row.needs for row in rows if row.name != "xla")
    rows = operator_table(llm.model_config, llm.runner.requirements, "float32")
    taken, runner = {row.operator: row.name for row in rows if row.used}, make_llm(programs={}).runner
    assert (taken["attention"], taken["linear"]) == (runner.implementation.name, runner.products.name)
    on_gpu = llm.runner.requirements._replace(platform="gpu", compute_capability=(7, 0))
    rows = operator_table(llm.model_config, on_gpu, "bfloat16")
    assert {row.name for row in rows if row.used} == {"xla"}
    assert all(row.unsupported for row in rows if row.name != "xla")
