"""jax's TPU kernel behind the contract, run on the CPU; and what is compiled for a TPU that is not there."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ksana_jax.core.compilation_cache import without_cache
from ksana_jax.core.config import ConfigError
from ksana_jax.devkit.compile_check import kernels, tpu_attention, tpu_topology
from ksana_jax.devkit.compile_check import tpu as tpu_check
from ksana_jax.devkit.compile_check.models import LLAMA_8B
from ksana_jax.devkit.compile_check.steps import collectives_of_step, lower_step
from ksana_jax.devkit.compile_check.targets import find_target, tpu_target
from pallas_kernels.aot.program import examine
from pallas_kernels.arguments import CHUNKED, RAGGED, WINDOW, Spec, make
from pallas_kernels.contract import Kernel, Result
from pallas_kernels.patterns import FULL
from tests.pallas_kernels.contract import check
from tests.soak import soak_unless

SPECS = (
    Spec(rows=RAGGED, num_heads=8, num_kv_heads=4, head_dim=128, block_size=32, num_layers=3, layer=0),
    Spec(rows=((257, 1), (0, 0), (1, 1), (64, 1)), num_kv_heads=1, head_dim=128, soft_cap=10.0, seed=1),
    Spec(rows=((75, 9), (0, 0), (1, 1)), q_tile=4, num_heads=2, head_dim=128, evict_every=3, seed=2),
    Spec(rows=CHUNKED, q_tile=8, num_heads=8, head_dim=128, block_size=64, evict_every=2, seed=3),
)


@pytest.fixture
def interpreted(monkeypatch):
    """pallas_call interpreted. The interpreter of TPU programs (pltpu.InterpretParams) cannot reshape a reference, as
    this kernel does, and the plain one cannot store under a mask at a fixed index, so that a select does it."""

    def store(ref, value, *, mask):
        ref[...] = jnp.where(mask, value, ref[...])

    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    monkeypatch.setattr(pltpu, "store", store)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("spec", soak_unless(SPECS[::2].__contains__, SPECS), ids=str)
def test_the_kernel_of_jax_keeps_the_contract(interpreted, spec):
    def attend(call, work, *, tuning):  # numbers of a pattern are traced here, and these are of FULL
        return tpu_attention.attend(call.replace(pattern=FULL), tuning=tuning)

    assert spec.pattern == FULL
    check(Kernel(attend, tpu_attention.Tuning(64, 8)), spec)


def test_it_serves_a_pool_that_rests_in_its_own_order(interpreted):
    spec = SPECS[0]
    pool = make(spec).pool.kv
    num_blocks, num_layers, _, kv_heads, block_size, head_dim = pool.shape
    pages = pool.transpose(0, 1, 4, 3, 2, 5).reshape(num_blocks * num_layers, block_size, 2 * kv_heads, head_dim)

    def attend(call, work, *, tuning):
        page_ids = call.tables * num_layers + call.layer
        return Result(tpu_attention.attend_pages(call.q, pages, page_ids, call.starts, call.positions, tuning=tuning))

    check(Kernel(attend, tpu_attention.Tuning(64, 4)), spec)


@pytest.mark.parametrize(
    ("changed", "options", "line"),
    [
        ({"pattern": WINDOW}, {}, "full attention only, known when compiled: Pattern.window=40"),
        ({"dtype": "float16"}, {}, "bfloat16 throughout, not float16 for float16 to float16"),
        ({}, {"out_dtype": jnp.float32}, "not bfloat16 for bfloat16 to float32"),
        ({"head_dim": 64}, {}, "compiles for head dim 128, not 64"),
        ({"num_heads": 6, "num_kv_heads": 3}, {}, "1, 2, 4 or a multiple of 8 kv heads, not 3"),
        ({"return_lse": True}, {}, "does not support return_lse"),
        ({"sink_logits": True, "sink_queries": 1}, {}, "does not support q_sink, sinks"),
        ({"codes": "int8"}, {}, "does not support scales"),
    ],
    ids=str,
)
def test_what_it_lacks_is_said(changed, options, line):
    call = make(Spec(**{"rows": ((20, 1),), "head_dim": 128, **changed}))
    with pytest.raises(NotImplementedError, match=line):
        tpu_attention.KERNEL(call.replace(**options))


def test_a_pattern_of_traced_numbers_is_refused():
    assert "known when compiled" in str(tpu_attention.KERNEL.unsupported(make(Spec(rows=((20, 1),), head_dim=128))))


def test_without_the_compiler_one_line_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(tpu_topology.importlib.util, "find_spec", lambda name: None)
    assert kernels.main("v5e", only="", as_json=False) == 2
    assert capsys.readouterr().err == (
        "ksana: error: compiling for a TPU needs libtpu; install the extra: pip install 'ksana-jax[aot-tpu]'\n"
    )


@pytest.mark.skipif(tpu_topology.missing() is not None, reason=str(tpu_topology.missing()))
def test_steps_and_the_kernel_of_jax_are_compiled_for_a_tpu_that_is_not_there():
    """What rows see is copied for the kernel, twice; in a pool that rests in the kernel's own order nothing is."""
    command = [sys.executable, "-c", "from ksana_jax.cli import main; main()", "kernels", "check", "--target", "v5e"]
    done = subprocess.run([*command, "--only", "phase=decode", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["target"] == "v5e" and found["failed"] == 0
    step, gathered, in_order = found["kernels"]
    assert step["kernels"] == 0 and step["alias_bytes"] == step["pool_bytes"] == 2 << 30
    assert step["temp_bytes"] < 16 << 20
    num_visible = tpu_check.DECODE.num_tiles * tpu_check.TABLE_WIDTH
    visible = num_visible * gathered["pool_bytes"] // (tpu_check.NUM_BLOCKS * tpu_check.LLAMA.num_layers)
    assert gathered["kernels"] == 1 and gathered["temp_bytes"] >= 2 * visible
    assert in_order["kernels"] == tpu_check.LLAMA.num_layers and in_order["temp_bytes"] < 1 << 20
    assert in_order["alias_bytes"] == in_order["pool_bytes"]


@pytest.mark.skipif(tpu_topology.missing() is not None, reason=str(tpu_topology.missing()))
def test_a_pool_that_is_copied_fails_the_check():
    def turned(target, num_blocks):
        def run(pool, q, tables, starts, positions):
            pages = pool.transpose(0, 1, 4, 3, 2, 5)[:, 1].reshape(num_blocks, 64, 16, 128)
            return tpu_attention.attend_pages(q, pages, tables, starts, positions)

        q, tables, starts, positions, _ = tpu_check.tiles(tpu_check.DECODE)
        pool = jax.ShapeDtypeStruct((num_blocks, 2, 2, 8, 64, 128), jnp.bfloat16)
        return tpu_check.lower(target, run, pool, q, tables, starts, positions)

    v5e = find_target("v5e")
    row = tpu_check.compile_case(tpu_check.Case("a layer turned", {}, turned), v5e)
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
