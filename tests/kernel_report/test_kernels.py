"""The report: with the extra aot-gpu installed, every kernel and the engine's steps compile for an H200.

`make kernels` runs these tests and shows the report that they judge; elsewhere those that compile are skipped.
"""

import json

import jax
import pytest

from ksana_jax.core.compilation_cache import without_cache
from ksana_jax.lab.trace.collectives import Collective
from ksana_jax.loading.load import abstract_params
from ksana_jax.sharding.shares import local_model
from pallas_kernels import aot
from tests.kernel_report.__main__ import main
from tests.kernel_report.check import check, find_cases
from tests.kernel_report.models import LLAMA_8B, LLAMA_70B, QWEN3_MOE, SHAPES
from tests.kernel_report.program import examine
from tests.kernel_report.steps import collectives_of_step, lower_sampling, lower_step

needs_plugin = pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))


@pytest.fixture
def h200(monkeypatch):
    with without_cache():
        yield aot.target("h200")


@pytest.mark.soak
@needs_plugin
@pytest.mark.parametrize(("model", "num_devices"), [(LLAMA_8B, 2), (LLAMA_70B, 8)], ids=["8B on 2", "70B on 8"])
def test_a_step_divided_among_gpus_has_two_sums_in_each_layer_and_kernels_on_the_heads_of_one(h200, model, num_devices):
    model, shape = model.first_layers(2), SHAPES[2]
    lowered = lower_step(h200, model, shape, num_devices=num_devices, attention="hopper", num_blocks=4096)
    program = examine(lowered, lowered.compile())
    hidden = shape.num_tokens * model.d_model * 2
    assert program.collectives == {Collective("all-reduce", hidden): 5}
    assert program.collectives == collectives_of_step(model, shape, num_devices)
    [pool] = program.pools
    assert pool == (4096, 2, 2, 8 // num_devices, 64, 128)
    # The pool is neither gathered nor copied, and written in place.
    assert program.wrong(program.collectives) == [] and program.memory.alias_bytes == program.memory.pool_bytes
    # Of each layer: the write, attention and merge of decodes, attention of tiles of 64 x 4 or x 8 rows.
    assert program.hlo.count('custom_call_target="mosaic_gpu_v2"') == 2 * 4
    params = abstract_params(local_model(model, num_devices), "bf16").replace(head=None)  # which the sampling reads
    weights = sum(x.size * 2 for x in jax.tree.leaves(params))
    assert 0 <= program.memory.argument_bytes - weights - program.memory.pool_bytes < 2**18  # tables and the like


@pytest.mark.soak
@needs_plugin
def test_sampling_on_gpus_gathers_candidates_and_not_scores(h200):
    lowered = lower_sampling(h200, LLAMA_8B.first_layers(1), 64, num_devices=8)
    found = examine(lowered, lowered.compile()).collectives
    assert {c.kind for c in found} == {"all-gather", "all-reduce"}
    assert max(c.bytes for c in found) < 64 * LLAMA_8B.vocab_size * 4 / 50


def test_the_report_has_steps_of_models_on_1_2_and_8_devices():
    cases = [case for _, _, case in find_cases(aot.target("h200"))]
    assert {case.config.get("devices", 1) for case in cases if case.name.startswith("step of Llama")} == {1, 2, 8}


@needs_plugin
def test_every_kernel_and_step_compiles_for_an_h200_and_steps_are_captured_whole(case_chosen):
    found = check("h200", chosen=case_chosen or (lambda case: True))
    assert found["target"] == "h200" and found["failed"] == 0
    steps = [
        row
        for row in found["kernels"]
        if row["name"].startswith("step of Llama") and row["config"]["attention"] == "hopper"
    ]
    # jax 0.10 names kernels that update arrays after a function of its own.
    updating = {"new_body"} if jax.__version_info__ < (0, 11) else {"kv_write", "hopper_merge"}
    kernels_of_steps = {"hopper_attention", "hopper_prefill", "hopper_mass", "hopper_product"}
    assert {row["kernel"] for row in steps} <= kernels_of_steps | updating
    h200 = aot.target("h200").memory_bytes
    for row in steps:
        for rows, of_layer in ((8, 7), (64, 11)):  # launches of a layer; some more belong to the step
            if row["config"] == {"attention": "hopper", "rows": rows, "tiles": 0}:
                assert of_layer * 32 < row["thunks"] < of_layer * 32 + 40
        assert row["alias_bytes"] == row["pool_bytes"] and row["temp_bytes"] < row["pool_bytes"] / 100
        assert row["captured"] == row["thunks"] > 0 or "devices" in row["config"]
        assert row["argument_bytes"] + row["temp_bytes"] < h200
    for row in found["kernels"]:
        if row["name"].startswith("recurrent") and "chunk" not in row["config"]["step"]:
            assert row["launches"] < 25 and row["captured"] == row["thunks"]  # however many rows: none has its own
            # Few rows read and write the weights again, which XLA joins.
            assert row["read_bytes"] + row["written_bytes"] < 4.5 * row["least_bytes"]
        if row["name"] == "step of Qwen3-MoE" and row["config"]["attention"] == "hopper":
            assert row["alias_bytes"] == row["pool_bytes"] and row["temp_bytes"] < row["pool_bytes"] / 50
            # Two of each layer stay outside of command buffers.
            assert row["thunks"] - row["captured"] <= 2 * QWEN3_MOE.num_layers
    if case_chosen is None:
        assert {row["kernel"] for row in steps} == kernels_of_steps | updating


@needs_plugin
def test_the_report_ends_with_one_json_object(capsys):
    assert main(["--only", "kv write$", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["failed"] == 0 and [row["name"] for row in found["kernels"]] == ["hopper kv write"]
