"""Recordings reproduce a run step by step, and show where two runs part."""

import dataclasses
import gc
import json
from pathlib import Path

import numpy as np
import pytest

from ksana_jax import AttentionPattern, LoRARequest, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.lab import recording
from ksana_jax.lab.trace import tracing
from ksana_jax.lab.trace.command import compare_recordings
from ksana_jax.lab.trace.differences import (
    first_difference,
    first_differences,
    other_requests,
    other_settings,
    other_tokens,
    outputs,
)
from ksana_jax.lab.trace.recorder import Recorder
from ksana_jax.lab.trace.replay import check_model, replay
from tests.engine.small import make_llm as small_llm
from tests.fakes import asking, make_engine, prompt_of, run, step
from tests.guessing import ANSWERS
from tests.lab.trace.recorded import SETTINGS, record

# With a tier on the host, the engine waits for the tokens of each step.
AHEAD = {"async_scheduling": True, "host_slots": 0, "preempt": "auto"}
SEVERAL = AHEAD | {"num_scheduler_steps": 3}
DRAFTS = {"speculative_config": {"method": "tests.guessing:Guessing", "num_speculative_tokens": 3, "guesses": "random"}}
MODES = pytest.mark.parametrize(
    "settings", [{}, AHEAD, SEVERAL, DRAFTS], ids=["synchronous", "ahead", "several at once", "drafts"]
)


@MODES
def test_a_replay_takes_the_same_decisions_blocks_and_tokens(tmp_path, settings):
    made, first = record(tmp_path / "a", **settings)
    assert first.scheduler.num_preemptions and any(e["event"] == "aborted" for e in made.events)
    again = make_engine(**SETTINGS | settings)
    done = replay(made, again)
    assert done.difference is None and done.num_steps == len(made.steps) == len(first.records)
    assert [r.without_times() for r in again.records] == [r.without_times() for r in first.records]
    assert not again.has_work


@MODES
def test_recorded_steps_are_what_the_executor_was_given(tmp_path, settings):
    made, engine = record(tmp_path / "a", **settings)
    for event, given in zip(made.steps, engine.executor.steps, strict=True):
        positions = [computed + i for _, computed, count in event["rows"] for i in range(count)]
        assert sorted(positions) == np.sort(given.arrays.positions[given.arrays.positions >= 0]).tolist()
    tables = {}
    for event in made.steps:
        for name, (kept, new) in event["blocks"].items():
            tables[name] = tables.get(name, [])[:kept] + new
        for name, computed, count in event["rows"]:
            assert len(tables[name]) * 4 >= computed + count and len(set(tables[name])) == len(tables[name])


def test_an_abort_within_a_call_is_replayed_before_the_same_step(tmp_path):
    def drive(engine):
        requests = [engine.add_request(prompt_of(5, i), asking(30), request_id=f"r{i}") for i in range(2)]
        while len(requests[0].completions[0].seq.token_ids) == 5:
            step(engine)
            if engine.executor.num_calls_together == 2:
                assert engine.num_steps_under_way > 1
                engine.abort("r0")
        engine.add_request(prompt_of(4, 9), asking(6), request_id="r2")
        run(engine)

    settings = SEVERAL | {"num_blocks": 64}
    made, first = record(tmp_path / "a", drive, **settings)
    again = make_engine(**SETTINGS | settings)
    assert replay(made, again).difference is None
    assert [r.without_times() for r in again.records] == [r.without_times() for r in first.records]


@pytest.mark.parametrize("kind", ["rows", "blocks", "tokens"])
def test_the_first_difference_is_found_and_ends_the_replay(tmp_path, kind):
    made, _ = record(tmp_path / "a")
    at = next(i for i, e in enumerate(made.steps) if i > 5 and e[kind])
    changed = made.steps[at]
    if kind == "rows":
        changed["rows"][0][2] += 1
    else:
        name = next(iter(changed[kind]))
        changed[kind][name] = [0, [99]] if kind == "blocks" else changed[kind][name] + 1
    done = replay(made, make_engine(**SETTINGS))
    assert (done.difference.step, done.difference.kind) == (changed["step"], kind) and done.num_steps == at + 1
    lines = done.difference.lines()
    assert lines[0].startswith(f"step {at + 1}: the first ") and lines[1] != lines[2] and "recorded" in lines[1]


def test_patterns_that_are_set_in_between_are_set_again(tmp_path):
    def drive(engine):
        for window in (None, 4):
            engine.set_patterns((AttentionPattern(window=window),) * 2)
            engine.add_request(prompt_of(11), asking(6))
            run(engine)

    made, _ = record(tmp_path / "a", drive, caching=False)
    assert replay(made, make_engine(**SETTINGS | {"caching": False})).difference is None


def test_two_policies_part_where_one_takes_another_request_first(tmp_path):
    def drive(engine):
        for i, length in enumerate((20, 9, 5)):
            engine.add_request(prompt_of(length, i), asking(4), request_id=f"r{i}")
        run(engine)

    fcfs, _ = record(tmp_path / "a", drive, policy="fcfs")
    shortest, _ = record(tmp_path / "b", drive, policy="shortest_first")
    assert (
        other_settings(fcfs, shortest) == {"policy": ("fcfs", "shortest_first")}
        and other_requests(fcfs, shortest) is None
    )
    found = first_difference(fcfs.steps, shortest.steps, ["rows"])
    assert (found.step, found.a[0], found.b[0]) == (1, ["r0/0", 0, 16], ["r2/0", 0, 5])
    assert first_differences(fcfs, fcfs) == {}
    # The recorded arrivals under the other policy give the other recording.
    done = replay(fcfs, make_engine(**SETTINGS | {"policy": "shortest_first"}), to_the_end=True)
    assert first_difference(shortest.steps, [s.plain() for s in done.recorder.steps]) is None


def test_compare_prints_the_first_decision_that_differs(tmp_path, run_ksana):
    def drive(engine):
        for i, length in enumerate((20, 5)):
            engine.add_request(prompt_of(length, i), asking(4), request_id=f"r{i}")
        run(engine)

    for name in ("fcfs", "shortest_first"):
        record(tmp_path / name, drive, policy=name)
    code, shown, _ = run_ksana("compare", tmp_path / "fcfs", tmp_path / "shortest_first", "--json")
    assert code == 0 and "policy: fcfs and shortest_first" in shown
    assert (
        "step 1: the first decision that differs\n  A  r0/0 computes 16 after 0\n  B  r1/0 computes 5 after 0" in shown
    )
    assert "all 2 sequences have the same tokens" in shown
    assert json.loads(shown.splitlines()[-1])["differences"]["rows"]["step"] == 1


def test_a_recording_names_its_model_though_the_engine_is_gone_before_the_trace_ends(tmp_path):
    with tracing(tmp_path / "out", profile_steps=0, record=True):
        engine = make_engine(**SETTINGS)
        engine.source = ("somewhere", "auto")  # by an LLM, after its engine was built
        engine.add_request(prompt_of(9), asking(4))
        run(engine)
        del engine
        gc.collect()
    made = recording.read_decisions(tmp_path / "out")
    assert (made.header["model"], made.header["load_format"]) == ("somewhere", "auto") and made.num_requests == 1


def test_other_tokens_are_found_by_sequence(tmp_path, capsys):
    made, _ = record(tmp_path / "a")
    assert other_tokens(made, made) == {}
    changed = next(e for e in made.steps[4:] if "r0/0" in e["tokens"])
    at = sum("r0/0" in e["tokens"] for e in made.steps[: changed["step"] - 1])
    old, changed["tokens"]["r0/0"] = changed["tokens"]["r0/0"], 60
    recording.write(tmp_path / "b" / recording.NAME, made.header, made.events)
    compare_recordings(tmp_path / "a", tmp_path / "b", tmp_path / "out", False)
    shown = capsys.readouterr().out
    assert f"sequences have other tokens; r0/0 from output token {at}: {old} and 60" in shown
    assert json.loads((tmp_path / "out/compare.json").read_text())["tokens"] == {"r0/0": at}


def test_tokens_are_compared_one_by_one_where_draft_tokens_give_runs(tmp_path, monkeypatch):
    def drive(engine):
        engine.add_request(prompt_of(9), asking(16), request_id="r")
        run(engine)

    plain, _ = record(tmp_path / "a", drive)
    monkeypatch.setitem(ANSWERS, prompt_of(9).tobytes(), [outputs(plain)["r/0"]])
    right = {"speculative_config": DRAFTS["speculative_config"] | {"guesses": "right"}}
    drafts, _ = record(tmp_path / "b", drive, **right)
    assert len(drafts.steps) < len(plain.steps) and outputs(drafts)["r/0"][:16] == outputs(plain)["r/0"]
    drafts.steps[2]["tokens"]["r/0"][1] = -1  # after a prompt's one token, and four of a step with three drafts
    assert other_tokens(drafts, plain) == {"r/0": 1 + 4 + 1}


def test_a_real_engine_samples_the_same_tokens_again_and_other_weights_are_refused(tmp_path):
    llm = small_llm()
    recorder = Recorder(llm.engine)
    asked = SamplingParams(max_tokens=6, temperature=1.0, top_k=8, detokenize=False, logit_bias={3: 1.5})
    llm.generate([[5] * 20, [7] * 9, [3] * 3], asked)
    recorder.stop()
    recorder.write(tmp_path / recording.NAME)
    made = recording.read_decisions(tmp_path)
    again = small_llm()
    check_model(made, again.engine)
    assert replay(made, again.engine).difference is None and len(made.steps) > 6
    other = dataclasses.replace(made, header=made.header | {"digest": "0" * 32})
    with pytest.raises(ConfigError, match="recorded with other weights of the model: digest 00000000, here"):
        check_model(other, again.engine)


def test_a_replay_compresses_a_context_before_its_question(tmp_path):
    eviction = {"method": "window", "budget": 8, "interval": 1, "prompts": "once"}
    llm = small_llm(kv_eviction=eviction, block_size=4)
    recorder = Recorder(llm.engine)
    asked = SamplingParams(max_tokens=6, temperature=0, detokenize=False, ignore_eos=True)
    llm.generate({"prompt_token_ids": [*range(3, 33)], "question_token_ids": [7, 9, 3]}, asked)
    recorder.stop()
    recorder.write(tmp_path / recording.NAME)
    made = recording.read_decisions(tmp_path)
    assert replay(made, small_llm(kv_eviction=eviction, block_size=4).engine).difference is None
    for event in made.events:
        for request in event.get("requests", []):
            request["num_question"] = 0
    assert replay(made, small_llm(kv_eviction=eviction, block_size=4).engine).difference is not None


def test_a_replay_computes_requests_with_their_adapters(tmp_path):
    golden = Path(__file__).parents[2] / "golden"
    settings = {"folder": golden / "llama-gqa-tied", "enable_lora": True}
    llm = small_llm(**settings)
    recorder = Recorder(llm.engine)
    asked = SamplingParams(max_tokens=6, temperature=0, detokenize=False)
    adapters = [LoRARequest(name, 1, str(golden / "lora" / f"llama-gqa-tied-{name}")) for name in ("plain", "all")]
    llm.generate([[5] * 20, [7] * 9, [3] * 3], asked, lora_request=[*adapters, None])
    recorder.stop()
    recorder.write(tmp_path / recording.NAME)
    made = recording.read_decisions(tmp_path)
    assert replay(made, small_llm(**settings).engine).difference is None
    for event in made.events:
        for request in event.get("requests", []):
            request.pop("lora_request", None)
    assert replay(made, small_llm(**settings).engine).difference is not None
