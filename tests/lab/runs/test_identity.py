"""A trial's id hashes the settings that differ from the defaults: a version with more settings resumes old runs."""

import dataclasses
import json
import shutil
from pathlib import Path

import fake_task
import pytest

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.lab.runs import identity
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.records import read
from ksana_jax.lab.runs.report import report
from ksana_jax.lab.runs.run import run
from ksana_jax.methods import presets

pytestmark = pytest.mark.usefixtures("fake")
# Written when ids were hashes of whole configs.
OLD_RECORDS = Path(__file__).parent / "data/records_of_first_stage.jsonl"
OLD = {
    "name": "old",
    "task": "fake",
    "model": "model",
    "engine": {"block_size": 8},
    "variants": [
        {"name": "full"},
        {"name": "sinks", "pattern": {"window": 8, "num_sinks": 2, "sink_position": "cache"}},
        {"name": "absolute", "pattern": {"window": 8, "num_sinks": 2, "sink_position": "absolute"}},
        {"name": "layers", "layer_patterns": [{"window": 4}, {}]},
    ],
    "grid": {"settings.x": [1, 2]},
    "seeds": [0, 1],
}


@pytest.fixture
def old_folder(tmp_path, monkeypatch):
    """A run of `OLD` by an earlier version, in the working directory that its model's path is relative to."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text('{"max_position_embeddings": 16}')
    Path("out").mkdir()
    shutil.copy(OLD_RECORDS, "out/records.jsonl")
    return Path("out")


def test_a_run_of_an_earlier_version_has_nothing_left_to_do(old_folder):
    experiment = plan(OLD)
    recorded = {json.loads(line).get("trial") for line in OLD_RECORDS.read_text().splitlines()}
    assert not recorded & {t.id for t in experiment.trials}
    outcome = run(experiment, old_folder)
    assert (outcome.num_done, outcome.num_skipped) == (0, 16)
    assert (old_folder / "records.jsonl").read_bytes() == OLD_RECORDS.read_bytes()
    assert [len(r.trials) for r in report(old_folder).rows] == [2] * 8


def test_a_setting_that_was_renamed_keeps_its_trials():
    start = next(r for r in map(json.loads, OLD_RECORDS.read_text().splitlines()) if r["kind"] == "start")
    now, before, other = (json.loads(json.dumps(start["config"])) for _ in range(3))
    for config, name in ((now, "max_repositioned_sinks"), (before, "max_rotated_sinks"), (other, "unknown")):
        config["engine"].pop("max_rotated_sinks")
        config["engine"][name] = 4
    assert identity.trial_id(before) == identity.trial_id(now) != identity.trial_id(other)


def test_an_earlier_version_s_folder_takes_new_trials(old_folder):
    outcome = run(plan({**OLD, "seeds": [0, 2]}), old_folder)
    assert (outcome.num_done, outcome.num_skipped) == (8, 8)
    assert [sorted(m["value"] for trial in r.trials for m in trial[:1]) for r in report(old_folder).rows][:2] == [
        [10, 12],
        [20, 22],
    ]


def test_a_failure_of_an_earlier_version_is_forgotten_once_its_trial_is_done(old_folder):
    lines = OLD_RECORDS.read_text().splitlines(keepends=True)
    last = json.loads(lines[-1])
    failed = {"schema_version": 1, "kind": "failed", "trial": last["trial"], "error": "RuntimeError: no"}
    (old_folder / "records.jsonl").write_text("".join(lines[:-1]) + json.dumps(failed) + "\n")
    experiment = plan(OLD)
    assert list(read(old_folder).failed) == [experiment.trials[-1].id]
    assert run(experiment, old_folder).num_done == 1
    assert not read(old_folder).failed


@dataclasses.dataclass
class LaterSettings(fake_task.FakeSettings):
    depth: int = 7
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])
    nested: EngineConfig = dataclasses.field(default_factory=EngineConfig)


@dataclasses.dataclass(frozen=True)
class LaterEngine(EngineConfig):
    kv_dtype: str = "like the weights"


@dataclasses.dataclass(frozen=True)
class LaterPattern(AttentionPattern):
    span: int | None = None


def test_settings_that_a_later_version_adds_leave_ids_as_they_are(old_folder, monkeypatch):
    from ksana_jax.lab.runs import config

    given = {**OLD, "settings": {"y": 0.25}}
    before = [t.id for t in plan(given).trials]
    monkeypatch.setattr(fake_task.Fake, "Settings", LaterSettings)
    for module in (identity, config):
        monkeypatch.setattr(module, "EngineConfig", LaterEngine)
    for module in (identity, presets):
        monkeypatch.setattr(module, "AttentionPattern", LaterPattern)
    # The engine of an experiment is typed by the class itself.
    monkeypatch.setitem(config.Experiment.__annotations__, "engine", LaterEngine)
    field = config.Experiment.__dataclass_fields__["engine"]
    monkeypatch.setattr(field, "type", LaterEngine)
    monkeypatch.setattr(field, "default_factory", LaterEngine)
    later = plan(given)
    assert later.trials[0].config["engine"]["kv_dtype"] == "like the weights"
    assert later.trials[2 * 2].config["pattern"]["span"] is None
    assert later.trials[0].config["settings"]["nested"]["block_size"] == 16
    assert [t.id for t in later.trials] == before
    for changed in ("settings.depth=8", "engine.kv_dtype=int8", "settings.nested.block_size=4"):
        assert not {t.id for t in plan(given, [changed]).trials} & set(before)


def test_a_default_that_changes_is_another_trial(model, monkeypatch):
    (before,) = plan({"task": "fake", "model": model}).trials
    (explicit,) = plan({"task": "fake", "model": model, "settings": {"num_lines": 3}}).trials
    assert explicit.id == before.id

    @dataclasses.dataclass
    class Changed(fake_task.FakeSettings):
        num_lines: int = 4

    monkeypatch.setattr(fake_task.Fake, "Settings", Changed)
    (after,) = plan({"task": "fake", "model": model}).trials
    # A record of before holds its number of lines, and is told apart by it.
    assert len({after.id, identity.recorded_id({"trial": before.id, "config": before.config})}) == 2


def test_where_sinks_stand_makes_no_difference_without_sinks(model):
    def ids(**pattern):
        return plan({"task": "fake", "model": model, "pattern": {"window": 8, **pattern}}).trials[0].id

    assert ids(sink_position="cache") == ids(sink_position="absolute") == ids()
    assert ids(num_sinks=1, sink_position="cache") != ids(num_sinks=1, sink_position="absolute")
    # Records of before the default changed say "absolute" themselves, and stay apart from it.
    assert ids(num_sinks=1) == ids(num_sinks=1, sink_position="cache")


def test_full_attention_is_not_the_model_s_own_pattern(model):
    assert plan({"task": "fake", "model": model, "pattern": {}}).trials[0].id != (
        plan({"task": "fake", "model": model}).trials[0].id
    )


@pytest.mark.parametrize("config", [None, {}, {"task": "gone"}, {"task": "fake", "engine": 3}])
def test_a_record_whose_config_says_nothing_keeps_its_own_id(config):
    assert identity.recorded_id({"trial": "abc", "config": config}) == "abc"
    assert identity.recorded_id({"trial": "abc"}) == "abc"
