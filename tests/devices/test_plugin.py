"""The engine on a PJRT plugin that others have built: OpenXLA's CPU client behind the C API; it calls itself "cpu"."""

import json
import re
import subprocess
import warnings

import jax
import pytest

from ksana_jax.lab.device_check.report import _run, probe
from ksana_jax.lab.runs.config import load
from ksana_jax.lab.runs.records import Shard
from ksana_jax.lab.runs.report import report
from ksana_jax.lab.runs.run import run
from ksana_jax.native.compiler import compiler_command
from tests.devices.children import ROOT, child, run_tests
from tests.devices.test_capabilities import EXPECTED
from tests.loopback import openxla
from tests.machine import compiled, no_native_products, real_plugin

pytestmark = real_plugin

# XLA optimises little, and compiles faster.
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
ENGINE = f"""
from ksana_jax import LLM, SamplingParams
from ksana_jax.devices import custom_calls
from ksana_jax.devices.platforms import platform_of
from ksana_jax.ops.implementations import explain
from ksana_jax.ops.native_operators import normaliser

def engine():
    llm = LLM("ksana-tiny", max_model_len=128, max_num_seqs=1, max_num_batched_tokens=16, device={openxla.DEVICE})
    assert llm.runner.platform == platform_of() == "npu"
    [output] = llm.generate("def main(", SamplingParams(temperature=0, max_tokens=8))
    assert output.outputs[0].token_ids == {EXPECTED}
    return llm.runner
"""


@compiled
def test_native_operators_run_on_it_and_tokens_are_those_of_a_cpu():
    child(
        f"""
    runner = engine()
    assert runner.implementation.name == "native" and runner.operators.normaliser is normaliser
    assert runner.products.name == ("xla" if {no_native_products is not None} else "packed")
    """,
        ENGINE,
    )


def test_without_the_ffi_extension_operators_of_xla_take_over_and_the_reason_is_said():
    child(
        """
    custom_calls.FFI = -1
    runner = engine()
    assert (runner.implementation.name, runner.products.name) == ("xla", "xla")
    [reason] = [why for name, used, why in explain() if name == "native"]
    assert reason == "the plugin's PJRT C API has no FFI extension, which registers custom calls"
    """,
        ENGINE,
        **QUICK,
    )


def test_the_probe_knows_it_by_the_name_under_which_it_is_registered():
    found = {f.what: f for f in _run("identity", openxla.DEVICE, 300)}
    assert re.fullmatch(r"npu \(cpu\), \d+ devices, whose client calls itself cpu", found["platform"].detail)
    assert found["PJRT C API"].detail == "0.115"


# Blocks that come back from the host and through pinned memory, and sampling.
FEW = (
    "engine/test_kv_equivalence.py::test_prefixes_that_have_been_on_the_host[none-back-full]",
    "engine/test_kv_equivalence.py::test_preempted_rows_swapped_or_computed_again[pinned_host-swap-cached]",
    "sampling/test_sampler.py::test_of_equal_scores_greedy_takes_the_lowest_id",
    "sampling/test_sampler.py::test_a_draw_depends_on_seed_and_number_of_outputs_alone_not_on_row_or_batch[32]",
)


def test_some_tests_of_blocks_and_sampling():
    output = run_tests(openxla.DEVICE, *(f"tests/{name}" for name in FEW), environment=QUICK)
    assert re.search(rf"^{len(FEW)} passed", output, re.M), output


def perplexities(device, folder, shard, *overrides):
    """Returns the perplexity of each row of the quickstart that was run."""
    plan = load(ROOT / "configs/quickstart.yaml", [*overrides, f"engine.device={json.dumps(device)}"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "max_model_len is .*, the model was trained for 256", UserWarning)
        assert not run(plan, folder, shard).failed
    return {row.label: row.values["ppl"][0] for row in report(folder).rows if "ppl" in row.values}


def compare_quickstart(folder, *arguments):
    """Runs the quickstart here, on a CPU, and in a process on the plugin; numbers differ by the rounding of sums."""
    output = child(f"""
    import json, pathlib
    from ksana_jax.lab.runs.records import Shard
    from tests.devices.test_plugin import perplexities
    print(json.dumps(perplexities({openxla.DEVICE}, pathlib.Path({str(folder / "npu")!r}), *{arguments})))
    """)
    found = json.loads(output.splitlines()[-2])
    expected = perplexities(None, folder / "cpu", *arguments)
    assert found and found == pytest.approx(expected, rel=1e-4)


def test_a_row_of_the_quickstart(tmp_path):
    compare_quickstart(tmp_path, Shard(3, 7), "settings.num_texts=1", "settings.num_tokens=256")


@pytest.mark.soak
def test_the_tests_of_sampling_blocks_and_greedy_tokens():
    """A part of what `pytest --device=plugin tests/kv tests/sampling tests/engine` runs."""
    names = ("sampling", "runner/test_movers.py", "kv/codecs", "engine/test_golden.py", "engine/test_kv_equivalence.py")
    output = run_tests(openxla.DEVICE, *(f"tests/{name}" for name in names), timeout=1200, environment=QUICK)
    assert re.search(r"^[1-9][0-9]+ passed", output, re.M), output


@pytest.mark.soak
def test_the_quickstart(tmp_path):
    compare_quickstart(tmp_path, Shard(1, 1))


@pytest.mark.soak
def test_the_probe_finds_that_the_engine_runs():
    made = probe(openxla.DEVICE, 300)
    assert made.verdict is None
    # The extension for costs is newer than jax 0.10; callbacks are registered with jaxlib's own CPU client.
    wrong = {f.what for group in made.groups.values() for f in group if f.works is False}
    assert wrong <= {"cost_analysis", "callbacks to Python"}


@compiled
@pytest.mark.soak
def test_the_custom_call_of_the_page_runs(tmp_path):
    page = (ROOT / "docs/extend/new-accelerator.md").read_text()
    [source] = re.findall(r"^```c\+\+\n(.*?)^```$", page, re.M | re.S)
    [code] = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    library = tmp_path / "own.so"
    (tmp_path / "own.cc").write_text(source)
    flags = ["-std=c++17", "-fPIC", "-shared", "-isystem", jax.ffi.include_dir(), str(tmp_path / "own.cc")]
    subprocess.run([*compiler_command(), *flags, "-o", str(library)], check=True)
    # Code of the page, below the indented lines of a child.
    output = child("", code.replace("./own.so", str(library)), NPU=str(openxla.PATH))
    assert output.splitlines()[-2] == "[0. 2. 4. 6.]"
