"""The bundle of a real engine: compiled functions with texts, costs and reasons, a profile by parts, and a page."""

import json
import re
import shutil
import subprocess

import pytest

from ksana_jax import SamplingParams
from ksana_jax.lab.trace import tracing
from ksana_jax.lab.trace.bundle import variables
from ksana_jax.lab.trace.parts import PARTS
from ksana_jax.lab.trace.timeline import DEVICE
from ksana_jax.ops.linear import choose_linear
from ksana_jax.runner.step_runs import compiled_programs
from ksana_jax.scheduler.step.types import StepShape
from tests.engine.small import make_llm
from tests.lab.trace.pages import Page


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A trace of six requests, and the engine: plain ones, then some that want log-probabilities."""
    folder = tmp_path_factory.mktemp("trace") / "out"
    with tracing(folder, command="a <small> engine", profile_steps=6):
        llm = make_llm(programs={})
        prompts = [[5] * 20, [7] * 9, [3] * 3]
        for logprobs in (None, 0):
            asked = SamplingParams(max_tokens=6, temperature=0, logprobs=logprobs, detokenize=False, ignore_eos=True)
            llm.generate(prompts, asked)
    return folder, json.loads((folder / "trace.json").read_text()), llm


def steps_of(folder):
    events = [json.loads(line) for line in (folder / "engine-1/recording.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "step"]


def test_every_compiled_function_has_its_texts_and_xlas_own_costs(bundle):
    folder, trace, llm = bundle
    assert len(trace["functions"]) == llm.num_compilations == trace["compilations"]["functions"]
    shapes = [key for key in llm.runner.programs if isinstance(key, StepShape)]
    steps = [f for f in trace["functions"] if f["name"].startswith("step ")]
    assert len(steps) == len(shapes)
    for shape, function in zip(shapes, steps, strict=True):
        for compiled, program in zip(compiled_programs(llm.runner.programs[shape]), function["programs"], strict=True):
            assert (folder / program["files"]["hlo"]).read_text() == compiled.as_text()
            assert (folder / program["files"]["jaxpr"]).read_text().count("{ lambda ")
            assert "stablehlo." in (folder / program["files"]["stablehlo"]).read_text()
            assert program["flops"] == compiled.cost_analysis()["flops"]
            assert program["memory"]["temp_bytes"] == compiled.memory_analysis().temp_size_in_bytes
        assert [program["calls"] for program in function["programs"]] == [1, 1, 1]  # two layers share a program
        assert function["flops"] == sum(program["flops"] for program in function["programs"])


def test_a_step_that_had_to_wait_for_a_function_says_why(bundle):
    folder, trace, _ = bundle
    reasons = [f["reason"] for f in trace["functions"]]
    assert reasons[0] == "no step was compiled before"
    assert any(re.search(r"from the nearest one: parts 4x4 -> 4x1", r) for r in reasons)
    assert "compiled were sample 4, greedy" in reasons[-1]
    steps = steps_of(folder)
    for function in trace["functions"]:
        assert function["name"] in steps[function["step"] - 1]["functions"]
    seconds = trace["compilations"]
    assert sum(s["slices"].get("compile", (0, 0))[1] for s in steps) == pytest.approx(
        seconds["traced_s"] + seconds["compiled_s"]
    )


def test_the_profile_is_divided_by_the_parts_of_the_model(bundle):
    folder, trace, _ = bundle
    [engine] = trace["engines"]
    assert engine["profiled_steps"] == 6 and list(folder.rglob("*.xplane.pb")) and list(folder.rglob("perfetto*.gz"))
    assert {"qkv", "attention", "mlp", "logits"} <= engine["profiled_s"].keys() <= {*PARTS, "other"}
    assert sum(engine["time_s"].values()) == pytest.approx(engine["seconds"])
    assert engine["implementation"] in ("native", "xla")


def test_a_step_has_every_part_of_the_model_among_its_operations(bundle):
    folder, _, _ = bundle
    texts = "".join(path.read_text() for path in folder.rglob("*.stablehlo.mlir")) + "".join(
        path.read_text() for path in folder.rglob("*.hlo.txt")
    )
    packed = choose_linear("cpu", "float32").packs  # one call has the output projection and the MLP
    assert [part for part in PARTS if f"/{part}/" not in texts] == (["output"] if packed else [])


def test_the_page_loads_nothing_and_sums_up_steps_shapes_and_functions(bundle):
    folder, trace, _ = bundle
    page = Page.of(folder / "index.html")
    assert page.loads == [] and page.title == "a <small> engine"
    [engine] = trace["engines"]
    assert ["steps", f"{engine['num_steps']:,}"] in page.rows and ["requests", "6"] in page.rows
    firsts = [row[0] for row in page.rows]
    assert {b["name"] for b in engine["buckets"]} | engine["time_s"].keys() <= {*firsts}
    for function in trace["functions"]:
        [row] = [row for row in page.rows if row[0] == function["name"] and len(row) == 7]
        assert row[1] == f"{function['flops']:.4g}" and row[5].endswith(f"waited: {function['reason']}")
    assert all((folder / link).is_file() for link in page.links)
    assert len(page.links) == 2 + 3 * sum(len(f["programs"]) for f in trace["functions"])


def test_the_timeline_has_every_step_and_request(bundle):
    folder, _, _ = bundle
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    on_device = [e for e in events if e["ph"] == "X" and e["tid"] == DEVICE]
    steps = steps_of(folder)
    assert [e["args"]["step"] for e in on_device] == [s["step"] for s in steps] and len(steps) > 6
    assert {e["id"] for e in events if e["ph"] == "b"} == {f"1/request-{i}" for i in range(6)}


def test_a_browser_without_a_network_shows_the_page_as_it_was_written(bundle, tmp_path):
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next((found for name in names if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium here")
    page = bundle[0] / "index.html"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom"]
    command = [browser, *flags, f"--user-data-dir={tmp_path}", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    # Had a tag been closed in the wrong place, the browser would have moved what follows.
    for mark in ("<tr>", "<td", "<table>", "<h2>", "<h3>"):
        assert shown.count(mark) == page.read_text().count(mark) > 0


def test_a_bundle_has_no_secrets(monkeypatch):
    monkeypatch.setenv("KSANA_HIDE", "")
    before = variables()
    for name in ("KSANA_API_KEY", "KSANA_JOB_TOKEN"):
        monkeypatch.setenv(name, "s3cret")
    assert variables() == before and "KSANA_HIDE" in before
