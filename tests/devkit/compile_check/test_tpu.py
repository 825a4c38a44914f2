"""Steps are compiled for a TPU that is not there."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from ksana_jax.core.compilation_cache import without_cache
from ksana_jax.core.config import ConfigError
from ksana_jax.devkit.compile_check import kernels, tpu_topology
from ksana_jax.devkit.compile_check import tpu as tpu_check
from ksana_jax.devkit.compile_check.models import LLAMA_8B
from ksana_jax.devkit.compile_check.steps import collectives_of_step, lower_step
from ksana_jax.devkit.compile_check.targets import find_target, tpu_target
from pallas_kernels.aot.program import examine


def test_without_the_compiler_one_line_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(tpu_topology.importlib.util, "find_spec", lambda name: None)
    assert kernels.main("v5e", only="", as_json=False) == 2
    assert capsys.readouterr().err == (
        "ksana: error: compiling for a TPU needs libtpu; install the extra: pip install 'ksana-jax[aot-tpu]'\n"
    )


@pytest.mark.skipif(tpu_topology.missing() is not None, reason=str(tpu_topology.missing()))
def test_a_step_is_compiled_for_a_tpu_that_is_not_there():
    command = [sys.executable, "-c", "from ksana_jax.cli import main; main()", "kernels", "check", "--target", "v5e"]
    done = subprocess.run([*command, "--only", "phase=decode", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["target"] == "v5e" and found["failed"] == 0
    [step] = found["kernels"]
    assert step["alias_bytes"] == step["pool_bytes"] == 2 << 30
    assert step["temp_bytes"] < 16 << 20


@pytest.mark.skipif(tpu_topology.missing() is not None, reason=str(tpu_topology.missing()))
def test_a_pool_that_is_copied_fails_the_check():
    def sorted_pool(target):
        pool = jax.ShapeDtypeStruct((4096, 2, 2, 8, 64, 128), jnp.bfloat16)
        with target.described():
            placed = target.placement().everywhere(pool)
            run = jax.jit(lambda pool: jnp.sort(pool, axis=0)[::2].sum(axis=0))
            return run.trace(placed).lower(lowering_platforms=("tpu",))

    v5e = find_target("v5e")
    row = tpu_check.compile_case(tpu_check.Case("a pool sorted", {}, sorted_pool), v5e)
    assert "bytes of temporaries, one layer's keys are 536,870,912" in row["reason"]
    row = tpu_check.compile_case(tpu_check.Case("refused", {}, lambda *args: 1 / 0), v5e)
    assert row["reason"] == "ZeroDivisionError: division by zero"


@pytest.mark.soak
@pytest.mark.skipif(tpu_topology.missing() is not None, reason=str(tpu_topology.missing()))
def test_a_step_divided_among_tpus_has_two_sums_in_each_layer():
    v5e, model = find_target("v5e"), LLAMA_8B.first_layers(2)
    with without_cache():
        lowered = lower_step(v5e, model, tpu_check.DECODE, num_devices=8, num_blocks=4096)
        program = examine(lowered, lowered.compile())
    assert program.wrong(collectives_of_step(model, tpu_check.DECODE, 8)) == []
    assert program.pools == ((4096, 2, 2, 1, 64, 128),)


def test_a_number_of_chips_that_no_host_has_is_refused():
    with pytest.raises(ConfigError, match="TPU v5 lite has hosts of 1, 2, 4, 8 chips, not 3"):
        tpu_target("v5e").placement(3)
