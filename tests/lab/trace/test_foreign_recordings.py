"""Recordings of others: what cannot be replayed is refused in one sentence, and nothing is run, made or downloaded."""

import dataclasses
import json

import pytest

from ksana_jax import AttentionPattern
from ksana_jax.core.config import ConfigError
from ksana_jax.lab import recording
from ksana_jax.lab.trace import tracing
from ksana_jax.lab.trace.replay import make_llm, replay
from tests.fakes import make_engine
from tests.lab.trace.recorded import SETTINGS, live, record


def test_recordings_that_cannot_be_replayed_are_one_line(tmp_path, run_ksana):
    made, _ = record(tmp_path / "a", lambda engine: None)

    def refusal(**header):
        recording.write(tmp_path / "a" / recording.NAME, made.header | header, [])
        shown = _fails(run_ksana, "trace", "replay", tmp_path / "a")
        assert shown.count("\n") == 1
        return shown

    assert "whose weights were in memory: replay it in Python" in refusal()
    assert "was recorded with jax 0.1, this is" in refusal(jax="0.1")
    assert "was recorded with ksana_jax 9, this is" in refusal(ksana_jax="9")
    opaque = {"model": "ksana-tiny", "load_format": "auto", "opaque": ["policy"]}
    assert "policy was an object, fcfs: give policy=NAME" in refusal(**opaque)
    assert "is a recording of format 7, this version reads 2" in refusal(format=7)
    assert "has no recording.jsonl" in _fails(run_ksana, "trace", "replay", tmp_path)
    (tmp_path / "a" / recording.NAME).write_text("[1]\n")
    assert "is not a recording" in _fails(run_ksana, "trace", "replay", tmp_path / "a")


def test_a_trace_without_decisions_has_no_prompts_and_cannot_be_replayed_or_compared(tmp_path, run_ksana):
    with tracing(tmp_path / "out", profile_steps=0):
        live(make_engine(**SETTINGS))
    text = (tmp_path / "out/engine-1/recording.jsonl").read_text()
    kinds = {json.loads(line)["event"] for line in text.splitlines()}
    assert kinds == {"recording", "step", "request"} and not any(f'"{k}"' in text for k in ("rows", "blocks", "tokens"))
    for words in (["trace", "replay", tmp_path / "out"], ["compare", tmp_path / "out", tmp_path / "out"]):
        shown = _fails(run_ksana, *words)
        assert "has times without decisions: `ksana trace run --record` records both" in shown
        assert shown.count("\n") == 1


def test_a_request_of_another_kind_is_named(tmp_path):
    recorded, _ = record(tmp_path)
    [first, *_] = [event for event in recorded.events if event["event"] == "created"]
    first["requests"][0]["prompt_token_ids"] = [2**40]
    with pytest.raises(ConfigError, match=r"request .r0. cannot be replayed: .*1099511627776"):
        replay(recorded, make_engine(**SETTINGS))


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("step", {"rows": None}, "step has no field 'rows'"),
        ("created", {"requests": None}, "created has no field 'requests'"),
        ("recording", {"digest": None}, "line 1: recording has no field 'digest'"),
        ("recording", {"config": []}, "config is [], which no 'recording' has"),
        ("recording", {"opaque": ["x"]}, "opaque has 'x', which is not in config"),
        ("created", {"requests": [{}]}, "requests is [{}], which no 'created' has"),
        ("added", {"request_ids": ["r9"]}, "no request 'r9' was created and not added"),
        ("step", {"rows": [["r0/0", 3]]}, "rows is [['r0/0', 3]], which no 'step' has"),
        ("step", {"tokens": {"r0/0": "x"}}, "tokens is {'r0/0': 'x'}, which no 'step' has"),
        ("added", {"event": "gone"}, "recordings have no event 'gone'"),
        ("added", {"event": ["gone"]}, "must be an event"),
    ],
)
def test_a_broken_line_is_named_before_anything_is_replayed(tmp_path, run_ksana, kind, change, says):
    record(tmp_path / "a")
    path = tmp_path / "a" / recording.NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    at = next(i for i, line in enumerate(lines) if line["event"] == kind)
    lines[at] = {k: v for k, v in (lines[at] | change).items() if v is not None or k not in change}
    path.write_text("\n".join(map(json.dumps, lines)))
    shown = _fails(run_ksana, "trace", "replay", path)
    assert f"{path}, line {at + 1}" in " ".join(shown.split()) and says in " ".join(shown.split())


def _fails(run_ksana, *words):
    code, _, error = run_ksana(*words)
    assert code == 2
    return error


def test_a_recording_has_all_that_its_engine_needs_to_be_built_again(tmp_path, monkeypatch):
    made, _ = record(tmp_path / "a", lambda engine: None)
    given = {}

    class Built:
        def __init__(self, model, **settings):
            given.update(settings, model=model)
            self.engine = make_engine(**SETTINGS)

    monkeypatch.setattr("ksana_jax.lab.trace.replay.LLM", Built)
    header = made.header | {"model": str(tmp_path), "load_format": "dummy"}
    make_llm(dataclasses.replace(made, header=header), {"policy": "shortest_first"})
    assert (given["model"], given["load_format"], given["policy"]) == (str(tmp_path), "dummy", "shortest_first")
    assert (given["num_blocks"], given["max_model_len"], given["preempt"]) == (12, 40, "swap")
    assert given["pattern"] == [AttentionPattern()] * 2


@pytest.mark.parametrize(
    ("header", "config", "said"),
    [
        ({"model": "nobody/nothing"}, {}, "nobody/nothing"),
        ({}, {"speculative_config": {"method": "draft_model", "model": "nobody/nothing"}}, "nobody/nothing"),
        (
            {},
            {"policy": "no_such_module:policy"},
            "own code, 'no_such_module:policy', which runs only with --own",
        ),
        ({}, {"policy": "ksana_jax.core.files:read_bytes"}, "own code, 'ksana_jax.core.files:read_bytes', which runs"),
        ({}, {"kv_eviction": {"of": [{"method": "no_such_module:M"}]}}, "names own code, 'no_such_module:M'"),
    ],
)
def test_a_recording_of_somebody_else_runs_no_code_and_downloads_nothing(
    header, config, said, tmp_path, monkeypatch, no_downloads
):
    made, _ = record(tmp_path / "a", lambda engine: None)
    header = made.header | {"model": str(tmp_path), "load_format": "dummy"} | header
    header["config"] = header["config"] | config
    with pytest.raises(ValueError, match=said):
        make_llm(dataclasses.replace(made, header=header))


@pytest.fixture
def no_downloads(monkeypatch):
    def refuse(*args, **settings):
        pytest.fail("something is downloaded")

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("ksana_jax.core.sources.hub._downloaded", refuse)


def test_places_of_a_recording_are_left_out_unless_they_are_given(tmp_path, monkeypatch):
    made, _ = record(tmp_path / "a", lambda engine: None)
    folder, given = tmp_path / "never made", {}

    class Built:
        def __init__(self, model, **settings):
            given.update(settings)
            self.engine = make_engine(**SETTINGS)

    monkeypatch.setattr("ksana_jax.lab.trace.replay.LLM", Built)
    config = made.header["config"] | {"disk_cache_dir": str(folder), "distributed": {"hosts": ["example"]}, "device": 1}
    made = dataclasses.replace(made, header=made.header | {"model": str(tmp_path), "config": config})
    make_llm(made)
    assert given.keys() == config.keys() - {"disk_cache_dir", "distributed", "device"} | {"pattern", "load_format"}
    make_llm(made, {"disk_cache_dir": "here"})
    assert given["disk_cache_dir"] == "here" and not folder.exists()


def test_an_event_of_a_recording_runs_no_own_code(tmp_path):
    made, _ = record(tmp_path / "a", lambda engine: None)
    event = {"event": "eviction", "method": {"method": "no_such_module:M", "budget": 8}}
    with pytest.raises(ConfigError, match=r"'no_such_module:M': code that a file names runs only with --own-code"):
        replay(dataclasses.replace(made, events=[event]), make_engine(**SETTINGS))
