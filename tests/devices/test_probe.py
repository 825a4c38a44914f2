"""`ksana doctor --device`: what it finds on the loopback where something is withheld, and on a CPU."""

import json

import pytest

from ksana_jax.lab.device_check import report
from ksana_jax.lab.device_check.findings import Finding, tried
from tests import loopback
from tests.machine import loopback_plugin


def found(group: str, seconds: float = 300, **options) -> dict[str, Finding]:
    return {f.what: f for f in report._run(group, loopback.setting(**options), seconds)}


def test_a_check_that_raises_is_a_finding():
    def fails():
        raise RuntimeError("two\nlines")

    assert tried("it", fails, "nothing") == Finding("it", False, "RuntimeError: two lines", "nothing")
    assert tried("it", lambda: 3) == Finding("it", True, "3")


@loopback_plugin
def test_missing_operations_are_named_one_by_one():
    operations = found("operations", lacks_operations=["scatter", "dynamic while"])
    missing = {what for what, f in operations.items() if f.works is False}
    assert missing == {"scatter, dropping what is beyond the end", "loop of dynamic length"}
    scatter = operations["scatter, dropping what is beyond the end"]
    assert "failed to legalize operation 'stablehlo.scatter'" in scatter.detail
    assert operations["loop of dynamic length"].without == "attention has loops of constant length"
    assert operations["the engine does without"].detail.startswith("no loops of dynamic length: attention reads whole")


@loopback_plugin
def test_a_function_without_which_jaxlib_ends_the_process_is_reported():
    [finding] = [f for f in found("identity", lacks=["Client_AddressableMemories"]).values() if f.works is False]
    assert finding.what == "the rest of this group" and "its process ended with signal 6" in finding.detail


@loopback_plugin
def test_a_group_that_hangs_is_ended():
    [finding] = report._run("identity", loopback.setting(), 0.05)
    assert finding.works is False and "it hung, and was ended after 0.05 s" in finding.detail


def test_tokens_are_compared():
    a, b = Finding("greedy tokens", True, "[1, 2]"), Finding("greedy tokens", True, "[1, 3]")
    assert report._compared([a], [a]) is None
    assert report._compared([a], [b]) == "greedy tokens are [1, 2], the CPU's [1, 3]"
    assert report._compared([Finding("x", False, "broken")], [a]) == "x: broken"


@loopback_plugin
@pytest.mark.soak
def test_the_engine_runs_where_everything_works():
    made = report.probe(loopback.setting(), 300)
    assert made.verdict is None
    wrong = {f.what for group in made.groups.values() for f in group if f.works is False}
    # The extension for costs is newer than jax 0.10; jax keeps programs of some platforms only.
    assert wrong <= {
        "jax's compilation cache",
        "custom calls into C++",
        "callbacks to Python",
        "dlpack",
        "cost_analysis",
    }
    assert json.loads(json.dumps(made.plain()))["groups"]["tokens"]
    assert "\n  works   greedy tokens of ksana-tiny: [" in made.text()
