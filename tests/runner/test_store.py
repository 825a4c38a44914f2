"""Programs that are kept on disk: their tokens, what a damaged or shared folder does to them, and how it is bounded."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import serialize_executable

from ksana_jax import LLM, SamplingParams
from ksana_jax.kv.layout import KVLayout, Leaf
from ksana_jax.ops.new_pool import make_cache
from ksana_jax.runner import movers, program_key, store
from ksana_jax.runner.compiling import compiled
from ksana_jax.runner.planner.step_memory import program_bytes
from ksana_jax.runner.program_key import Lowering
from ksana_jax.runner.step_runs import compiled_programs
from ksana_jax.runner.stored_program import StoredProgram
from ksana_jax.sharding.placement import ONE_DEVICE
from tests.engine import test_lora
from tests.engine.small import complete, make_llm

PROMPT: Any = {"prompt_token_ids": [3, 5, 7, 3, 5, 7, 9, 3, 5, 7, 11, 3, 5, 7, 13, 15, 3, 5, 7, 17]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty store; functions that jax has compiled before are forgotten."""
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "programs"))
    monkeypatch.delenv(store.SWITCH, raising=False)
    jax.clear_caches()
    return tmp_path / "programs"


@pytest.fixture
def said(caplog):
    """Returns (number of functions compiled, number found in the store) since the last call."""
    caplog.set_level(logging.INFO, logger="ksana_jax")

    def count() -> tuple[int, int]:
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return sum(" traced in " in m for m in messages), sum(m.startswith("found ") for m in messages)

    return count


def entries(folder: Path) -> list[Path]:
    return [path for _, _, path in store.entries(folder)]


def answer(programs: dict | None = None, asked: dict | None = None, **settings):
    """Tokens and their log-probabilities of a new engine."""
    llm = make_llm(programs={} if programs is None else programs, **settings)
    output = complete(llm, PROMPT, **({"logprobs": 2, "detokenize": False} | (asked or {})))
    return output.token_ids, output.logprobs


SETTINGS = {
    "eviction": {"kv_eviction": {"method": "h2o", "budget": 16}},
    "eviction by facts of the model": {"kv_eviction": {"method": "vatp", "budget": 36}},
    "selection": {"kv_selection": {"method": "quest", "budget": 32, "full_layers": 1}},
    "speculation": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "kv_cache_dtype": "int4"},
    "several steps a call": {"num_scheduler_steps": 4},
    "sampled": {"asked": {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5, "prompt_logprobs": 1}},
}


@pytest.mark.cpu("programs of CPUs are stored")
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_of_stored_programs_equal_those_of_compiled_ones(name, folder, said, monkeypatch):
    monkeypatch.setenv(store.SWITCH, "off")
    expected = answer(**SETTINGS[name])
    assert said()[0] > 1 and not folder.exists()
    jax.clear_caches()
    monkeypatch.delenv(store.SWITCH)
    assert answer(**SETTINGS[name]) == expected
    compiled, found = said()
    assert compiled > 1 and found == 0 and len(entries(folder)) == compiled
    jax.clear_caches()
    assert answer(**SETTINGS[name]) == expected
    assert said() == (0, compiled)


@pytest.mark.cpu("programs of CPUs are stored")
def test_adapters_are_written_to_engines_of_stored_programs(folder, said):
    answers, prompts, adapter = [], [{"prompt_token_ids": [3, 5, 7]}], test_lora.adapter("all")
    for _ in range(2):
        jax.clear_caches()
        llm = test_lora.engine(programs={})
        outputs = [llm.generate(prompts, test_lora.SCORED, lora_request=each)[0].outputs[0] for each in (None, adapter)]
        answers.append([(output.token_ids, output.logprobs) for output in outputs])
        compiled, found = said()
    assert answers[0] == answers[1] and answers[0][0] != answers[0][1] and compiled == 0 and found > 1


@pytest.mark.cpu("programs of CPUs are stored")
def test_a_stored_step_has_the_facts_of_a_compiled_one(folder):
    facts = []
    for _ in range(2):
        answer(programs := {})
        facts.append(
            {key: (program_bytes(step), len(getattr(step, "programs", "1"))) for key, step in programs.items()}
        )
    assert facts[0] == facts[1] and all(size for size, _ in facts[0].values())
    for step in programs.values():
        for program in compiled_programs(step):
            assert isinstance(program, StoredProgram)
            assert program.memory_analysis().temp_size_in_bytes >= 0 and "HloModule" in program.as_text()


@pytest.mark.cpu("programs of CPUs are stored")
def test_an_engine_that_is_warmed_up_loads_no_program(folder, said, monkeypatch):
    settings: Any = {"max_num_seqs": 2, "max_model_len": 64, "num_blocks": 16, "host_cache_bytes": 2**20}
    asked = SamplingParams(n=2, temperature=1.0, logprobs=2)
    LLM("ksana-tiny", **settings).warm_up(sampling_params=asked)
    compiled, _ = said()
    jax.clear_caches()
    monkeypatch.setattr(serialize_executable, "_JaxPjrtUnpickler", lambda *_: pytest.fail("loaded"))
    llm = LLM("ksana-tiny", **settings)
    llm.warm_up(sampling_params=asked)
    assert said() == (0, compiled) and compiled > 10 and llm.memory_usage()["step"].measured


LAYOUT = KVLayout((), 2, (Leaf("kv", (2, 2, 1, 2, 4), "float32"),))


def gathered(size: int = 3, blocks: int = 5) -> np.ndarray:
    """Blocks of a pool by a small program."""
    pool: Any = make_cache(LAYOUT, blocks)
    ids = jax.ShapeDtypeStruct((size,), np.int32)
    settings: Any = {"run": movers._gathered, "placement": ONE_DEVICE, "donated": None}
    run = compiled(("gather", size), Lowering(movers.lower_move, jax.eval_shape(lambda: pool), ids, **settings))
    numbers = np.arange(blocks, dtype=np.float32).reshape(-1, 1, 1, 1, 1, 1) + pool.leaves["kv"]
    return np.asarray(run(pool.replace(leaves={"kv": numbers}), np.arange(size)[::-1]).leaves["kv"])[:, 0, 0, 0, 0, 0]


WANTED = [2, 1, 0]


def damages():
    yield "noise", lambda content: os.urandom(200_000)
    yield "noise in the program", lambda content: content[:-900] + os.urandom(900)
    yield "noise in the header", lambda content: content[:100] + os.urandom(100) + content[200:]
    yield "half", lambda content: content[: len(content) // 2]
    yield "no header", lambda content: content[:10]
    yield "nothing", lambda content: b""
    yield "a long header", lambda content: content[:20] + b"\xff" * 1000


@pytest.mark.cpu("programs of CPUs are stored")
@pytest.mark.parametrize("damage", [pytest.param(damage, id=name) for name, damage in damages()])
def test_a_damaged_entry_is_compiled_again_and_replaced(damage, folder, said):
    gathered()
    [path] = entries(folder)
    path.write_bytes(damage(whole := path.read_bytes()))
    jax.clear_caches()
    assert gathered().tolist() == WANTED
    if path.stat().st_size == len(whole):  # only the program is damaged, which is found when it is loaded
        path.unlink()
        jax.clear_caches()
        gathered()
    said()
    jax.clear_caches()
    assert gathered().tolist() == WANTED and said() == (0, 1)


@pytest.mark.cpu("programs of CPUs are stored")
def test_a_program_that_xla_does_not_load_is_compiled(folder, monkeypatch, caplog):
    gathered()

    def refuse(*_):
        raise RuntimeError("INTERNAL: no")

    monkeypatch.setattr(serialize_executable, "_JaxPjrtUnpickler", refuse)
    assert gathered().tolist() == WANTED
    assert "compiled again: INTERNAL: no" in caplog.text


@pytest.mark.cpu("programs of CPUs are stored")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_program_runs_where_nothing_can_be_written(number, folder, said, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        assert gathered().tolist() == WANTED and said() == (1, 0) and not entries(folder)
    jax.clear_caches()
    assert gathered().tolist() == WANTED and len(entries(folder)) == 1


CHILD = """
import os, sys
from tests.runner.test_store import gathered
if sys.argv[1:] == ["killed"]:
    os.replace = lambda *_: os.kill(os.getpid(), 9)
print(*(gathered(size).tolist() for size in (3, 4, 5, 6)))
"""


def child(*words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *words],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": ""},
        stdout=subprocess.PIPE,
        text=True,
    )


GOLDEN = """
import logging, sys
from ksana_jax import LLM, SamplingParams
from tests.golden.cases import golden_cases
logging.basicConfig(level=logging.INFO)
case = next(case for case in golden_cases() if case.name == "mistral-gqa")
asked = SamplingParams(temperature=0, max_tokens=len(case.greedy[0]), ignore_eos=True, detokenize=False)
for devices in (1, 2):
    llm = LLM(case.model_dir, max_num_seqs=3, max_num_batched_tokens=32, tensor_parallel_size=devices)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in case.prompts], asked)
    assert [output.outputs[0].token_ids for output in outputs] == [tokens.tolist() for tokens in case.greedy]
"""


@pytest.mark.cpu("programs of CPUs are stored")
def test_golden_tokens_on_one_device_and_on_two_come_from_stored_programs_too(folder, tmp_path):
    counts = []
    for _ in range(2):
        flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "NPROC": "8"}
        environment = os.environ | flags | {"JAX_COMPILATION_CACHE_DIR": ""}
        command, root = [sys.executable, "-c", GOLDEN], Path(__file__).parents[2]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        counts.append((done.stderr.count(" traced in "), done.stderr.count(":found ")))
    (compiled, _), (again, found) = counts
    assert compiled > 4 and again == 0 and found == compiled


@pytest.mark.cpu("programs of CPUs are stored")
def test_a_process_that_is_killed_while_it_writes_leaves_no_entry(folder):
    killed = child("killed")
    killed.communicate(timeout=300)
    assert killed.returncode == -9 and not entries(folder) and list(folder.iterdir())
    assert gathered().tolist() == WANTED and len(entries(folder)) == 1


@pytest.mark.cpu("programs of CPUs are stored")
def test_two_processes_fill_one_folder_at_the_same_time(folder, said):
    both = [child(), child()]
    answers = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0] and answers[0] == answers[1]
    assert answers[0].split("] [")[1] == "3.0, 2.0, 1.0, 0.0"
    assert gathered(4).tolist() == [3, 2, 1, 0] and said() == (0, 1) and len(entries(folder)) == 4


@pytest.mark.cpu("programs of CPUs are stored")
def test_a_folder_that_others_can_write_is_refused_and_named_once(folder, said, caplog):
    folder.mkdir()
    folder.chmod(0o777)
    for _ in range(2):
        assert gathered().tolist() == WANTED
    assert [r.getMessage() for r in caplog.records if "not stored" in r.getMessage()] == [
        f"compiled programs are not stored: {folder} must be a folder of this user with mode 0700, and no link"
    ]
    assert said() == (2, 0) and not entries(folder) and str(folder) in (store.why_off() or "")


@pytest.mark.cpu("programs of CPUs are stored")
@pytest.mark.parametrize("kind", ["link", "writable", "FIFO"])
def test_an_entry_that_others_may_have_written_is_not_loaded_but_replaced(kind, folder, said, tmp_path):
    gathered()
    [path] = entries(folder)
    if kind == "writable":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere") if kind == "link" else os.mkfifo(path)
    said()
    jax.clear_caches()
    assert gathered().tolist() == WANTED and said() == (1, 0)
    assert path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.cpu("programs of CPUs are stored")
def test_entries_that_were_not_used_for_longest_are_removed_beyond_a_size(folder, monkeypatch):
    for size in (3, 4, 5):
        gathered(size)
    for time, path in enumerate(entries(folder), 1):
        os.utime(path, (time, time))
    oldest, *_ = entries(folder)
    gathered(3)
    assert oldest.stat().st_mtime > 3 or gathered(4) is not None  # finding an entry counts as use
    kept = entries(folder)[-1]
    monkeypatch.setattr(store, "MAX_STORE_BYTES", int(1.5 * kept.stat().st_size))
    store._since_trim.clear()
    store._trim(folder, 1)
    assert entries(folder) == [kept]


@pytest.mark.cpu("programs of CPUs are stored")
def test_the_check_finds_an_entry_of_another_program(folder, said, monkeypatch):
    """As if a key lacked something."""
    gathered(3)
    [path] = entries(folder)
    gathered(4)
    [other] = {*entries(folder)} - {path}
    monkeypatch.setenv(store.SWITCH, "check")
    assert gathered(3).tolist() == WANTED and said() == (2, 1)
    path.write_bytes(other.read_bytes())
    with pytest.raises(store.WrongProgram, match="lower_move lowers to another program today"):
        gathered(3)


@pytest.mark.parametrize("off", ["KSANA_PROGRAMS", "jax", "a plugin"])
def test_the_store_is_off_with_its_switch_with_jaxs_and_on_plugins(off, folder, monkeypatch):
    before = jax.config.values["jax_enable_compilation_cache"]
    if off == "jax":
        jax.config.update("jax_enable_compilation_cache", False)
    elif off == "a plugin":
        monkeypatch.setattr(store, "platform_of", lambda: "npu")
    else:
        monkeypatch.setenv(off, "off")
    try:
        assert gathered().tolist() == WANTED and store.why_off() and not folder.exists()
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


@pytest.mark.cpu("programs of CPUs are stored")
def test_nothing_is_stored_once_the_package_was_edited(folder, monkeypatch):
    gathered(3)
    monkeypatch.setattr(program_key, "started_s", 0.0)
    gathered(4)
    program_key.sources.cache_clear()
    gathered(5)
    program_key.sources.cache_clear()
    assert len(entries(folder)) == 1


@pytest.mark.cpu("programs of CPUs are stored")
def test_a_process_that_replaced_code_of_the_package_neither_reads_nor_writes(folder, said, monkeypatch):
    gathered()
    monkeypatch.setattr(movers, "_in_order", lambda ids: ids)
    gathered(3)
    gathered(4)
    assert said() == (3, 0) and len(entries(folder)) == 1
    monkeypatch.undo()


@pytest.mark.cpu("programs of CPUs are stored")
def test_a_process_with_another_constant_compiles_and_one_without_it_too(folder, said, monkeypatch):
    for sizes in ((1, 8, 64), (1, 8), (1, 8, 64)):
        jax.clear_caches()
        monkeypatch.setattr(movers, "SIZES", sizes)
        gathered()
    assert said() == (3, 0)
    gathered()
    assert said() == (0, 1)
