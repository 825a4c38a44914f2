"""`ksana_jax.run` does what `ksana run` does, and its result shows itself."""

import sys
import types

import pytest
import yaml

import ksana_jax
from ksana_jax.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("fake")


@pytest.fixture
def experiment(model):
    return {"task": "fake", "model": model, "variants": [{"name": n, "settings.x": x} for n, x in (("a", 1), ("b", 2))]}


def test_python_continues_what_the_command_has_begun(experiment, tmp_path, run_ksana):
    (tmp_path / "file.yaml").write_text(yaml.dump(experiment))
    assert run_ksana("run", tmp_path / "file.yaml", "seeds=[0]", "settings.y=1.5", "--out", tmp_path / "out")[0] == 0
    table, records = ((tmp_path / "out" / name).read_text() for name in ("table.md", "records.jsonl"))
    for given in (experiment, tmp_path / "file.yaml"):
        found = ksana_jax.run(given, {"settings.y": 1.5}, seeds=range(1), name="file", out=tmp_path / "out")
        assert repr(found) == table and (found.folder / "records.jsonl").read_text() == records
        assert [(r["label"], len(r["measurements"])) for r in found.records] == [("a", 3), ("b", 3)]
    found = ksana_jax.run(experiment, {"settings.y": 1.5}, seeds=[0, 1, 2], name="file", out=tmp_path / "out")
    assert found.report.rows[0].mean("mean") == 12.5 and found.figure.axes[0].lines
    assert "data:image/png;base64,iVBOR" in found._repr_markdown_()
    assert "+10.000" in found.compare("a", "b")


def test_the_table_is_a_data_frame_if_pandas_is_installed(experiment, tmp_path, monkeypatch):
    found = ksana_jax.run(experiment, out=tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert repr(found.table).startswith("| row | mean | lines |")
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(read_csv=lambda text: text.read()))
    assert found.table.startswith("row,seeds,mean,")


def test_a_failed_trial_is_named_or_raised(experiment, tmp_path):
    found = ksana_jax.run(experiment, {"settings.fail_at": 2}, out=tmp_path)
    assert found.failed == {"b, seed 0": "RuntimeError: x is 2"} and "failed: b, seed 0: RuntimeError" in repr(found)
    with pytest.raises(RuntimeError, match="x is 2"):
        ksana_jax.run(experiment, {"settings.fail_at": 2}, out=tmp_path, debug=True)


def test_what_is_no_experiment_is_refused_in_a_sentence(experiment):
    for given, said in (
        ({"titel": "x"}, "unknown key 'titel'; the nearest is 'title'"),
        ({"seeds": [0.5]}, "seeds"),
        ({"settings": {"x": 1j}}, "1j is of type complex: an experiment has values as in YAML"),
    ):
        with pytest.raises(ConfigError, match=said):
            ksana_jax.run(experiment | given)
    with pytest.raises(FileNotFoundError, match="no such experiment file"):
        ksana_jax.run("quikstart")


def test_a_class_of_a_notebook_is_measured_anew_by_each_call(fake, model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "a_notebook", module := types.ModuleType("a_notebook"))
    for added in (1, 2):
        vars(module)["Task"] = Task = type("Task", (fake.Fake,), {"__module__": "a_notebook"})
        Task.summarise = lambda self, measurements, added=added: {"mean": added, "lines": 0}
        assert ksana_jax.run({"task": Task, "model": model}, out=tmp_path).report.rows[0].mean("mean") == added
