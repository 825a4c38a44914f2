"""`make test` leaves out tests that no changed file can affect, and runs all when it does not know."""

import subprocess

import pytest

from tests import unchanged

FLUID = "tests/serve/router/test_fluid.py"
KERNEL = "tests/pallas_kernels/hopper/test_merge.py"
BUILDS_AN_ENGINE = "tests/pallas_kernels/test_own_kernel.py"
ALL = {FLUID, KERNEL, BUILDS_AN_ENGINE}


@pytest.mark.parametrize(
    "files, run",
    [
        (None, ALL),
        ([], set()),
        (["tests/conftest.py"], ALL),
        (["constraints.txt"], ALL),
        (["ksana_jax/native/kernel.cpp"], ALL),
        (["CHANGELOG.md", "tests/engine/test_engine.py", "experiments/h2o/records.jsonl"], set()),
        ([KERNEL], {KERNEL}),
        (["pallas_kernels/work.py"], ALL - {FLUID}),
        (["ksana_jax/serve/router/policies/e2.py"], {FLUID, BUILDS_AN_ENGINE}),  # a string in the table of policies
        (["ksana_jax/engine/engine.py"], {BUILDS_AN_ENGINE}),  # by LLM of ksana_jax, which imports it when asked
        (["ksana_jax/methods/codecs/turboquant.py"], {BUILDS_AN_ENGINE}),  # f"{_FILES}.turboquant:turboquant4"
        (["ksana_jax/ops/gpu_kernels.py"], {BUILDS_AN_ENGINE}),  # import_module(f"ksana_jax.ops.{module}")
        (["ksana_jax/core/processor.py"], ALL),  # by conftest.py
    ],
)
def test_only_tests_that_no_change_can_affect_are_left_out(files, run):
    assert ALL - set(unchanged.unchanged(files)) == run


def test_imports_of_fixtures_count_where_they_are_named_and_those_of_types_never(tmp_path, monkeypatch):
    monkeypatch.setattr(unchanged, "ROOT", tmp_path)
    code = {
        "conftest.py": "def made():\n    from toy import used\n",
        "test_a.py": "def test(made): ...",
        "test_b.py": "",
    }
    code |= {"toy/used.py": "if TYPE_CHECKING:\n    import toy.types\n", "toy/types.py": ""}
    (tmp_path / "toy").mkdir()
    for name, text in code.items():
        (tmp_path / name).write_text(text)
    found = [{path.name for path in unchanged.dependencies(tmp_path / f"test_{x}.py")} for x in "ab"]
    assert found == [{"conftest.py", "test_a.py", "used.py"}, {"conftest.py", "test_b.py"}]


def test_edited_and_new_files_have_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(unchanged, "ROOT", tmp_path)
    git = ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x"]
    for name in (".ci/speed.base", "edited.py", "same.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("0" * 40)
    assert unchanged.changed_files() is None
    for command in (["init", "-q"], ["add", "edited.py", "same.py"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    assert unchanged.changed_files() is None  # there is no such commit
    (tmp_path / ".ci/speed.base").write_text("HEAD")
    (tmp_path / "edited.py").write_text("")
    assert unchanged.changed_files() == ["edited.py", ".ci/speed.base"]
