"""Two processes of this machine divide a model, with gloo between them: the same tokens as one, and one clear end."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.engine.distributed.test_rendezvous import free_port
from tests.loading.models_on_disk import TINY, random_tensors, write_model

MODEL = dataclasses.replace(TINY, vocab_size=300, num_heads=4, num_kv_heads=2, d_ff=64, tie_embeddings=False)
pytestmark = pytest.mark.soak
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "",
    "KSANA_JOB_TOKEN": "of the tests",
}


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model", random_tensors(MODEL), MODEL)


@contextlib.contextmanager
def processes(*commands, **environment):
    """Starts commands as processes, and ends those that are left."""
    found = []
    try:
        for command in commands:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            found.append(subprocess.Popen(command, env=os.environ | ENVIRONMENT | environment, **pipes))
        yield found
    finally:
        for process in found:
            process.kill()
            process.communicate()


def setting(address: str, process_id: int, **others) -> str:
    return json.dumps(
        {"coordinator_address": address, "num_processes": 2, "process_id": process_id, "initialization_timeout": 60}
        | others
    )


def job(scenario, model, *own_model):
    """The commands of both processes."""
    address = f"127.0.0.1:{free_port()}"
    program = [sys.executable, "-m", "tests.engine.distributed.leader"]
    followed = ["follow", str(*(own_model or (model,))), address, *(["own"] if own_model else [])]
    return [*program, scenario, str(model), address], [*program, *followed]


def said(process, timeout=240) -> list[dict]:
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, out[-3000:] + err[-3000:]
    return [json.loads(line) for line in out.splitlines()]


def check_equal(lines) -> None:
    equal = [line for line in lines if "one" in line]
    assert equal
    for line in equal:
        assert line["several"] == line["one"]


def test_two_processes_give_the_tokens_of_one(model):
    with processes(*job("everything", model)) as (leads, follows):
        lines = said(leads)
        assert follows.communicate(timeout=20) == ("", "")
    check_equal(lines)
    numbers = {name: value for line in lines for name, value in line.items()}
    assert numbers["preempted"] > 0 and numbers["saved"] > 0 and numbers["loaded"] > 0 and numbers["filled"]
    several, one = numbers["block_bytes"]
    assert 2 * several == one  # each host has one of two kv heads
    assert numbers["compiled_later"] == 0


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_job_within_ten_seconds(model, victim):
    with processes(*job("forever", model)) as both:
        leads, follows = both
        assert json.loads(leads.stdout.readline())["running"]
        time.sleep(0.3)
        os.kill(both[victim].pid, signal.SIGTERM if victim else signal.SIGKILL)
        began = time.monotonic()
        other = both[1 - victim]
        out, err = other.communicate(timeout=10)
        assert time.monotonic() - began < 10
        if victim == 0:
            # jax notices at the same time, and prints more.
            ours = "ksana: error: process 0 (127.0.0.1:" in err and " is gone: " in err
            assert (other.returncode, ours) == (1, True) or "JAX distributed service detected fatal errors" in err
            assert other.returncode in (1, -signal.SIGABRT)
        else:
            first, again = (json.loads(line) for line in out.splitlines())
            assert first["error"] == again["again"] and f":{follows.pid}) is gone" in first["error"]
            assert (err, other.returncode) == ("", 0)


def test_a_process_that_lacks_the_model_is_named(model, tmp_path):
    (tmp_path / "other").mkdir()
    with processes(*job("forever", model, tmp_path / "other")) as (leads, follows):
        _, err = leads.communicate(timeout=60)
        last = err.splitlines()[-1]
        assert last.startswith("ksana_jax.core.errors.ConfigError: process 1 (") and "config.json" in last
        assert follows.communicate(timeout=20) == ("", "") and follows.returncode == 0


def test_a_process_with_other_weights_is_named(model, tmp_path):
    other = write_model(tmp_path / "other", random_tensors(MODEL, seed=1), MODEL)
    with processes(*job("forever", model, other)) as (leads, _):
        _, err = leads.communicate(timeout=60)
        assert "has model files with the digest" in err.splitlines()[-1]


def test_the_same_command_in_each_process(model):
    """As a launcher starts it, or a script: every process but process 0 follows."""
    address = f"127.0.0.1:{free_port()}"
    script = (
        "import sys, json; from ksana_jax import LLM, SamplingParams; "
        "llm = LLM(sys.argv[1], dtype='f32', tensor_parallel_size=2, max_num_seqs=int(sys.argv[3]), max_model_len=8, "
        "max_num_batched_tokens=1, num_blocks=4, distributed=json.loads(sys.argv[2])); "
        "params = SamplingParams(temperature=0, max_tokens=3, detokenize=False); "
        "print(len(llm.generate({'prompt_token_ids': [5]}, params)[0].outputs[0].token_ids))"
    )
    for numbers, printed in ((("1", "1"), "3\n"), (("1", "2"), "")):
        commands = [
            [sys.executable, "-c", script, str(model), setting(address, i), number] for i, number in enumerate(numbers)
        ]
        with processes(*commands) as (leads, follows):
            out, err = leads.communicate(timeout=60)
            assert out == printed, err
            if not printed:
                assert "it was given max_num_seqs 2, process 0 1" in err.splitlines()[-1]
            assert follows.communicate(timeout=20) == ("", "") and follows.returncode == 0


def test_programs_in_which_jax_runs_already_share_an_engine(model):
    address = f"127.0.0.1:{free_port()}"
    program = [sys.executable, "-m", "tests.engine.distributed.leader", "running", str(model), address]
    with processes([*program, "0"], [*program, "1"]) as (leads, follows):
        output, errors = leads.communicate(timeout=300)
        assert leads.returncode == 0, errors[-2000:]
        assert follows.wait(60) == 0, follows.stderr.read()[-2000:]
        first, last = map(json.loads, output.splitlines())
        assert first == {"devices": 2} and last["several"] == last["one"]
        assert [json.loads(line) for line in follows.stdout] == [first]


@pytest.mark.parametrize("seeds", ["11", "12"])
def test_an_spmd_program_gives_the_same_tokens_in_each_process_or_names_the_one_that_differs(model, seeds):
    address = f"127.0.0.1:{free_port()}"
    program = [sys.executable, "-m", "tests.engine.distributed.leader", "spmd", str(model), address]
    with processes(*([*program, str(i), seed] for i, seed in enumerate(seeds))) as both:
        first, second = (said(process, 300) for process in both)
    check_equal(first)
    assert first[0]["several"] == second[0]["several"]
    errors = [line["error"] for line in (*first[1:], *second[1:])]
    assert len(errors) == (2 if seeds == "12" else 0)
    assert all(error.startswith("process 1 calls step of engine 0 with inputs ") for error in errors)
