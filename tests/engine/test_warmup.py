"""Programs that are compiled in the background: which shapes steps take meanwhile, and what ends the compiling."""

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ksana_jax import LLM, AttentionPattern, SamplingParams
from ksana_jax.engine import warmup
from ksana_jax.runner import store
from ksana_jax.runner.programs import ModelPrograms
from ksana_jax.scheduler.step.ladders import plain_shapes, stages

pytestmark = pytest.mark.cpu("programs are compiled in the background on CPUs")
SETTINGS: Any = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "query_tile": 16, "block_size": 2}
SETTINGS |= {"max_model_len": 256, "num_blocks": 400}
GREEDY = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
PROMPTS = [
    "Once upon a time",
    "The",
    "A long way from here there was a small house in which nobody had lived for years",
]


@pytest.fixture(autouse=True)
def empty_store(tmp_path, monkeypatch):
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "programs"))
    monkeypatch.delenv(store.SWITCH, raising=False)
    jax.clear_caches()


@pytest.fixture
def gate(monkeypatch):
    """Lets the compiling thread go on; opened at the end."""
    opened, compiles = threading.Event(), warmup._compile
    monkeypatch.setattr(warmup, "_compile", lambda *given: opened.wait(60) and compiles(*given))
    yield opened
    opened.set()


def compiling() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ksana-compile"]


def wait_for_end() -> None:
    for thread in compiling():
        thread.join(120)
        assert not thread.is_alive()


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def test_steps_take_larger_shapes_until_their_own_are_compiled(gate):
    llm = LLM("ksana-tiny", **SETTINGS)
    few, more, buckets = stages(llm.engine.builder.buckets)
    expected = answers(llm)
    smallest = {record.shape for record in llm.records}
    llm = LLM("ksana-tiny", **SETTINGS)
    llm.warm_up(in_background=True)
    left, compiled = llm.engine.num_compiling, llm.num_compilations
    assert left > 4 and answers(llm) == expected and llm.num_compilations == compiled
    meanwhile = {record.shape for record in llm.records}
    assert meanwhile <= {*plain_shapes(few)} and not smallest <= meanwhile
    gate.set()
    wait_for_end()
    assert llm.engine.num_compiling == 0 and llm.engine.builder.buckets == buckets
    before, compiled = len(llm.records), llm.num_compilations
    assert answers(llm) == expected and llm.num_compilations == compiled
    assert {record.shape for record in llm.records[before:]} == smallest
    assert {*plain_shapes(few)} < {*plain_shapes(more)} < {*plain_shapes(buckets)}


def test_masks_of_grammars_are_compiled_last_in_the_background(gate):
    asked = SamplingParams(max_tokens=9, structured_outputs={"regex": "[a-z]{4}"})
    plain = LLM("ksana-tiny", **SETTINGS)
    plain.warm_up(sampling_params=SamplingParams())
    llm = LLM("ksana-tiny", **SETTINGS)
    assert llm.warm_up(sampling_params=[SamplingParams(), asked], in_background=True) == plain.num_compilations
    assert llm.engine.num_compiling > 0
    gate.set()
    wait_for_end()
    compiled = llm.num_compilations
    assert [len(o.outputs[0].text) for o in llm.generate(PROMPTS, asked)] == [4, 4, 4]
    assert llm.num_compilations == compiled > plain.num_compilations and llm.engine.num_compiling == 0


def test_nothing_is_left_where_the_store_has_all_programs():
    LLM("ksana-tiny", **SETTINGS).warm_up()
    llm = LLM("ksana-tiny", **SETTINGS)
    buckets = llm.engine.builder.buckets
    llm.warm_up(in_background=True)
    assert not compiling() and llm.engine.num_compiling == 0 and llm.engine.builder.buckets is buckets


def test_a_program_that_does_not_compile_is_one_error_and_requests_go_on(monkeypatch, caplog):
    llm, calls, compiles = LLM("ksana-tiny", **SETTINGS), [], ModelPrograms.compile

    def refuse(runner, keys, *given, **settings):
        if threading.current_thread().name == "ksana-compile" and len(calls) == 2:
            raise RuntimeError("INTERNAL: no")
        calls.append(keys)
        compiles(runner, keys, *given, **settings)

    monkeypatch.setattr(ModelPrograms, "compile", refuse)
    few = stages(llm.engine.builder.buckets)[0]
    llm.warm_up(in_background=True)
    wait_for_end()
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert errors == ["steps take larger shapes, as one is not compiled: RuntimeError: INTERNAL: no"]
    compiled = llm.num_compilations
    assert all(answers(llm)) and llm.num_compilations == compiled
    assert llm.engine.builder.buckets == few and llm.engine.num_compiling == 0


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_while_programs_are_compiled(level, gate):
    llm = LLM("ksana-tiny", **SETTINGS)
    llm.warm_up(in_background=True)
    expected = answers(llm)
    llm.sleep(level)
    gate.set()
    wait_for_end()
    compiled = llm.num_compilations
    llm.wake_up()
    assert answers(llm) == expected and llm.num_compilations == compiled


def test_programs_compiled_asleep_are_found_by_the_next_process(gate):
    """Their keys are those of an engine that is awake."""
    llm = LLM("ksana-tiny", **SETTINGS)
    llm.warm_up(in_background=True)
    llm.sleep(2)
    gate.set()
    wait_for_end()
    LLM("ksana-tiny", **SETTINGS).warm_up(in_background=True)
    assert not compiling()


def test_another_eviction_method_ends_the_compiling_for_the_engine_before(gate):
    llm = LLM("ksana-tiny", **SETTINGS)
    llm.warm_up(in_background=True)
    before = llm.runner
    llm.set_kv_eviction({"method": "h2o", "budget": 16})
    compiled = before.num_compilations
    gate.set()
    wait_for_end()
    assert before.num_compilations <= compiled + 1 and all(answers(llm)) and llm.engine.num_compiling == 0


def test_numbers_of_the_eviction_method_change_while_programs_are_compiled(gate):
    llm = LLM("ksana-tiny", **SETTINGS, kv_eviction={"method": "h2o", "budget": 16})
    buckets = llm.engine.builder.buckets
    llm.warm_up(in_background=True)
    llm.set_kv_eviction({"method": "h2o", "budget": 24})
    assert all(answers(llm))
    gate.set()
    wait_for_end()
    assert llm.engine.builder.buckets == buckets and all(answers(llm))


def test_programs_for_other_patterns_are_not_kept(gate):
    """With the native kernels' plan, a program depends on which layers are alike."""
    llm = LLM("ksana-tiny", **SETTINGS)
    patterns = [AttentionPattern(window=8 * (1 + layer % 2)) for layer in range(llm.model_config.num_layers)]
    llm.warm_up(in_background=True)
    llm.set_pattern(patterns)
    gate.set()
    wait_for_end()
    found = answers(llm)
    alone = LLM("ksana-tiny", **SETTINGS)
    alone.set_pattern(patterns)
    assert found == answers(alone)


def test_a_busy_engine_lets_a_program_wait_but_not_forever(monkeypatch, gate):
    monkeypatch.setattr(warmup, "PATIENCE_S", 0.3)
    llm = LLM("ksana-tiny", **SETTINGS)
    llm.warm_up(in_background=True)
    llm.engine.add_request(np.array([3, 5, 7]), GREEDY)
    left = llm.engine.num_compiling
    gate.set()
    time.sleep(0.2)
    assert llm.engine.num_compiling == left
    wait_for_end()
    assert llm.engine.has_work and llm.engine.num_compiling == 0


EXIT = """
import sys
from ksana_jax import LLM
llm = LLM("ksana-tiny")
llm.warm_up(in_background=True)
print(llm.engine.num_compiling)
"""


def test_a_process_ends_while_programs_are_compiled():
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", EXIT], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr
    assert "Fatal" not in done.stderr and "terminate" not in done.stderr
