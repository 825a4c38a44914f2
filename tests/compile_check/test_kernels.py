"""`ksana kernels check`: with the extra aot-gpu installed, every kernel and the engine's steps compile for an H200."""

import json

import pytest

from ksana_jax.compile_check import kernels
from pallas_kernels import aot


@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
def test_every_kernel_and_step_compiles_for_an_h200_and_steps_are_captured_whole(capsys):
    assert kernels.main("h200", only="", as_json=True) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["target"] == "h200" and found["failed"] == 0
    steps = [
        row for row in found["kernels"] if row["name"] == "step of Llama-8B" and row["config"]["attention"] == "hopper"
    ]
    assert {row["kernel"] for row in steps} == {"hopper_attention", "hopper_merge", "hopper_prefill", "kv_write"}
    for row in steps:
        assert row["alias_bytes"] == row["pool_bytes"] and row["temp_bytes"] < row["pool_bytes"] / 100
        assert row["captured"] == row["thunks"] > 0


def test_mistyped_targets_and_cases_are_said_before_anything_is_compiled():
    with pytest.raises(ValueError, match="unknown target 'h2000'; there are a100, h100, h200, v5e"):
        kernels.main("h2000", only="", as_json=False)
