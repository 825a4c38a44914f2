"""A saved session continues in another engine as in its own: the same tokens from the same number of cached ones."""

import dataclasses
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ksana_jax import SamplingParams
from ksana_jax.engine import session_files
from ksana_jax.engine.session_files import SessionError
from ksana_jax.loading.tensor_files import write_tensors
from tests.engine import small
from tests.engine.small import VOCAB, assert_idle, tokens_of
from tests.soak import soak_unless

make_llm = functools.partial(
    small.make_llm, block_size=4, num_blocks=128, max_num_batched_tokens=16, query_tile=8, enable_prefix_caching=True
)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
TEXT, ONE, OTHER = (x.tolist() for x in np.split((2 + np.random.default_rng(3).permutation(VOCAB - 2))[:38], [33, 35]))
STREAMED = {"budget": 14, "prompts": "streamed", "recent": 3}
QUEST = {"method": "quest", "budget": 16, "full_layers": 1}
H2O, ONCE = {"method": "h2o", **STREAMED}, {"method": "snapkv", "budget": 14, "prompts": "once", "recent": 3}

# Settings, pattern, and the tokens of the second turn that are found: full blocks, or all that a snapshot has.
CASES = {
    "plain": ({}, None, 44),
    "int8": ({"kv_cache_dtype": "int8"}, None, 44),
    "kivi": ({"kv_cache_dtype": {"k": "kivi4", "v": "kivi2", "residual": 6}}, None, 44),
    "bf16": ({"dtype": "bf16"}, None, 44),
    "sinks": ({}, {"window": 8, "num_sinks": 2, "sink_position": "cache"}, 44),
    "mixed layers": ({}, [{"window": 6}, "full"], 44),
    "quest": ({"kv_selection": QUEST}, None, 44),
    "h2o": ({"kv_eviction": H2O}, None, 44),
    "window": ({"kv_eviction": {"method": "window", **STREAMED}}, None, 44),
    # The first layer evicts nothing, so its blocks are a prefix's and a snapshot's.
    "pyramid": ({"kv_eviction": {"method": "window", **STREAMED, "budget": 36, "layers": "pyramid"}}, None, 44),
    "h2o int8": ({"kv_eviction": H2O, "kv_cache_dtype": "int8"}, None, 44),
    "random, mixed layers": ({"kv_eviction": {"method": "random", **STREAMED}}, [{"window": 6}, "full"], 44),
}
KEPT = {"plain", "kivi", "sinks", "quest", "pyramid", "h2o int8"}


def first_turn(llm):
    [output] = llm.generate({"prompt_token_ids": TEXT}, GREEDY)
    return output


def second_turn(output) -> dict:
    return {"prompt_token_ids": TEXT + output.outputs[0].token_ids + ONE}


@pytest.mark.parametrize("name", soak_unless(KEPT.__contains__, CASES))
def test_another_engine_continues_with_the_same_tokens(name, tmp_path):
    settings, pattern, cached = CASES[name]
    saving, restoring = (make_llm(pattern=pattern, **settings) for _ in range(2))
    output = first_turn(saving)
    assert saving.save_session(output, tmp_path) == cached
    turn = second_turn(output)
    [expected] = tokens_of(make_llm(pattern=pattern, enable_prefix_caching=False, **settings), [turn], GREEDY)
    assert restoring.restore_session(tmp_path) == cached
    assert_idle(restoring)
    for llm in (restoring, saving):
        [found] = llm.generate(turn, GREEDY)
        assert (found.outputs[0].token_ids, found.num_cached_tokens) == (expected, cached)
        assert_idle(llm)


def test_any_question_starts_from_the_text_that_was_compressed_once(tmp_path):
    saving, restoring = (make_llm(kv_eviction=ONCE) for _ in range(2))
    asked = [{"prompt_token_ids": TEXT, "question_token_ids": question} for question in (ONE, OTHER)]
    [output] = saving.generate(asked[0], GREEDY)
    saving.save_session(output, tmp_path)
    restoring.restore_session(tmp_path)
    expected = tokens_of(make_llm(kv_eviction=ONCE, enable_prefix_caching=False), asked, GREEDY)
    found = restoring.generate(asked, GREEDY)
    assert [one.outputs[0].token_ids for one in found] == expected
    assert [one.num_cached_tokens for one in found] == [len(TEXT)] * 2


@pytest.mark.cpu("the other process runs there")
def test_another_process_continues(tmp_path):
    llm = make_llm(kv_eviction=H2O)
    output = first_turn(llm)
    llm.save_session(output, tmp_path)
    turn = second_turn(output)
    script = f"""
from tests.engine.test_sessions import GREEDY, H2O, make_llm
llm = make_llm(kv_eviction=H2O)
llm.restore_session({str(tmp_path)!r})
[output] = llm.generate({turn!r}, GREEDY)
print(output.num_cached_tokens, output.outputs[0].token_ids)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    [expected] = tokens_of(make_llm(kv_eviction=H2O, enable_prefix_caching=False), [turn], GREEDY)
    assert run.stdout == f"44 {expected}\n"


@pytest.mark.parametrize(("eviction", "num_blocks"), [(None, 16), (H2O, 6)])
def test_blocks_that_are_on_the_host_are_saved_from_there(eviction, num_blocks, tmp_path):
    settings = {"kv_eviction": eviction, "num_blocks": num_blocks, "host_cache_bytes": 2**16}
    saving, restoring = (make_llm(**settings) for _ in range(2))
    output = first_turn(saving)
    saving.generate({"prompt_token_ids": TEXT[::-1]}, GREEDY)
    saving.save_session(output, tmp_path)
    assert saving.engine.memory.counters.saved, "some have left the device"
    turn = second_turn(output)
    restoring.restore_session(tmp_path)
    [found] = restoring.generate(turn, GREEDY)
    [expected] = tokens_of(make_llm(**settings | {"enable_prefix_caching": False}), [turn], GREEDY)
    assert (found.outputs[0].token_ids, found.num_cached_tokens) == (expected, 44)
    assert_idle(restoring)


@pytest.mark.parametrize("eviction", [None, H2O])
def test_a_request_that_runs_or_waits_is_saved_by_its_id(eviction, tmp_path):
    llm = make_llm(kv_eviction=eviction, async_scheduling=False)
    engine = llm.engine
    request = engine.add_request(np.array(TEXT), GREEDY)
    for _ in range(8):
        engine.step()
    assert llm.save_session(request.request_id, tmp_path) == (36 if eviction is None else 32)
    computed = int(engine.scheduler.rows.num_computed[0])
    engine.lock.run(engine.scheduler._preempt, 0)
    count = llm.save_session(request.request_id, tmp_path)
    assert count == (computed // 4 * 4 if eviction is None else computed)
    while engine.has_work:
        engine.step()
    expected = tokens_of(make_llm(kv_eviction=eviction), [{"prompt_token_ids": TEXT}], GREEDY)
    assert [request.output().outputs[0].token_ids] == expected
    other = make_llm(kv_eviction=eviction)
    other.restore_session(tmp_path)
    [found] = other.generate(second_turn(request.output()), GREEDY)
    assert found.num_cached_tokens == count
    with pytest.raises(SessionError, match="no request 'request-9' runs or waits"):
        llm.save_session("request-9", tmp_path)


def test_a_session_of_one_salt_is_not_found_with_another(tmp_path):
    saving, restoring = (make_llm() for _ in range(2))
    [output] = saving.generate({"prompt_token_ids": TEXT, "cache_salt": "a"}, GREEDY)
    saving.save_session(output, tmp_path)
    restoring.restore_session(tmp_path)
    turn = second_turn(output)
    found = [restoring.generate(turn | {"cache_salt": salt}, GREEDY)[0].num_cached_tokens for salt in ("b", "", "a")]
    assert found == [0, 0, 44]


OTHERS = {
    "block_size 4, this engine has 8": {"block_size": 8},
    "dtype f32, this engine has bf16": {"dtype": "bf16"},
    "kv_cache_dtype f32, this engine has int8": {"kv_cache_dtype": "int8"},
    "kv_eviction H2O(budget=14, ": {"kv_eviction": H2O | {"budget": 20}},
    "kv_eviction H2O(": {"kv_eviction": {"method": "window", **STREAMED}},
    "this engine has None": {"kv_eviction": None},
    "with pattern full": {"pattern": [{"window": 6}, "full"]},
}


@pytest.mark.parametrize("said", OTHERS)
def test_engines_with_other_settings_refuse_it_and_name_both(said, saved):
    llm = make_llm(**{"kv_eviction": H2O} | OTHERS[said])
    with pytest.raises(SessionError, match=re.escape(said)) as caught:
        llm.restore_session(saved)
    assert "\n" not in str(caught.value) and " this engine has " in str(caught.value)


def test_an_engine_that_selects_refuses_blocks_without_summaries(tmp_path):
    saving = make_llm()
    saving.save_session(first_turn(saving), tmp_path)
    with pytest.raises(SessionError, match=r"with kv_selection None, this engine has Quest\("):
        make_llm(kv_selection=QUEST).restore_session(tmp_path)


def test_an_engine_of_another_model_refuses_it(saved):
    llm = make_llm(kv_eviction=H2O)
    index, scope = llm.engine.memory.index, llm.engine.memory.index.scope
    index.set_scope(dataclasses.replace(scope, model="0" * 32))
    with pytest.raises(SessionError, match=f"with model digest {scope.model}, this engine has {'0' * 32}"):
        llm.restore_session(saved)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    llm = make_llm(kv_eviction=H2O)
    llm.save_session(first_turn(llm), folder)
    return folder


def blocks_of(folder: Path) -> Path:
    [found] = folder.glob("blocks-*.safetensors")
    return found


def truncate(folder):
    blocks_of(folder).write_bytes(blocks_of(folder).read_bytes()[:-100])


def flip(folder):
    data = bytearray(blocks_of(folder).read_bytes())
    data[-100] ^= 1
    blocks_of(folder).write_bytes(data)


def edit(folder):
    path = folder / "session.json"
    path.write_text(path.read_text().replace('"num_context": 33', '"num_context": 34'))


def next_version(folder):
    path = folder / "session.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))


DAMAGE = {
    "has [0-9,]+ of [0-9,]+ bytes": truncate,
    "safetensors is damaged: its checksum is wrong": flip,
    "session.json is damaged: its checksum is wrong": edit,
    "is of version 2, this is 1": next_version,
    "not the JSON of a session": lambda folder: (folder / "session.json").write_text('{"version": 1, "ma'),
    "session.json is damaged: it is not the JSON": lambda folder: (folder / "session.json").write_text("[1]"),
    "blocks-.* cannot be read: No such file": lambda folder: blocks_of(folder).unlink(),
    "session.json cannot be read: No such file": lambda folder: (folder / "session.json").unlink(),
}


def craft(folder, facts=None, **tensors):
    """Changes a session as somebody would who computes the checksums again."""
    path, stored = folder / "session.json", blocks_of(folder)
    values = json.loads(path.read_text())
    found = load_file(stored) | tensors
    save_file({name: value for name, value in found.items() if value is not None}, stored)
    values["blocks"] |= {"bytes": stored.stat().st_size, "sha256": session_files._digest(stored)}
    values = {name: value for name, value in (values | (facts or {})).items() if name != "sha256"}
    path.write_text(json.dumps({**values, "sha256": session_files._checksum(values)}))


LONG = {"file": "blocks-0.safetensors", "bytes": 1, "sha256": ""}
NOT_JSON, OF_PART = "it is not the JSON of a session", "part 0 has blocks of which not each has its own place"
CRAFTED = [
    ({"made_with": []}, {}, NOT_JSON),
    ({"cache_salt": None}, {}, NOT_JSON),
    ({"num_context": "33"}, {}, NOT_JSON),
    ({"parts": 44}, {}, NOT_JSON),
    ({"parts": [44.5]}, {}, NOT_JSON),
    ({"parts": [-4]}, {}, NOT_JSON),
    ({"blocks": None}, {}, NOT_JSON),
    ({"blocks": LONG | {"more": 1}}, {}, NOT_JSON),
    ({"blocks": LONG | {"file": "../blocks-0.safetensors"}}, {}, NOT_JSON),
    ({"blocks": LONG | {"file": "blocks-/../../x.safetensors"}}, {}, NOT_JSON),
    ({"blocks": LONG | {"file": "blocks-\0.safetensors"}}, {}, NOT_JSON),
    ({"parts": [2**30]}, {}, "part 0 has 1,073,741,824 tokens"),
    ({"parts": [43]}, {}, "part 0 has 43 tokens, 0 numbers of evicted ones"),
    ({"parts": [44, 40]}, {}, "part 0 has 44 tokens, 0 numbers of evicted ones"),
    ({}, {"0.places": None}, "it has no '0.places'"),
    ({}, {"0.places": np.full(11, 3, np.int32)}, OF_PART),
    ({}, {"token_ids": np.zeros((4, 11), np.int32)}, r"token_ids is int32\[4, 11\], must be int32 from 0"),
    ({}, {"token_ids": None}, "it has no 'token_ids'"),
    ({}, {"0.places": np.full(11, 11, np.int32)}, r"0.places is int32\[11\], must be int32 from 0 to 10"),
    ({}, {"0.places": np.zeros(11)}, r"0.places is float64\[11\], must be int32 from 0 to 10"),
    ({}, {"0.starts": np.full(11, 44, np.int32)}, r"0.starts is int32\[11\], must be int32 from 0 to 43"),
    ({}, {"0.groups": np.full(11, 1, np.int32)}, r"0.groups is int32\[11\], must be int32 from 0 to 0"),
    ({}, {"0.num_evicted": np.full(1, 4, np.int32)}, "part 0 has 44 tokens, 1 numbers of evicted ones"),
    ({}, {"0.places": np.zeros(10, np.int32)}, OF_PART),
    ({}, {"0.starts": np.zeros(11, np.int32)}, OF_PART),
    ({}, {"0.starts": np.arange(11, dtype=np.int32)}, OF_PART),
    (
        {},
        {"block.kv": np.zeros((2**40, 0), np.float32)},
        r"kv is float32\[1099511627776, 0\], the layout has kv float32",
    ),
    ({}, {"block.kv": None}, "it has no 'block.kv'"),
]


@pytest.mark.parametrize(("facts", "tensors", "said"), CRAFTED, ids=lambda value: str(value)[:40])
def test_crafted_files_are_one_error_before_anything_of_their_sizes_is_made(facts, tensors, said, tmp_path):
    llm = make_llm()
    llm.save_session(first_turn(llm), tmp_path)
    craft(tmp_path, facts, **tensors)
    with pytest.raises(SessionError, match=f"{tmp_path}/.* is damaged: {said}") as caught:
        llm.restore_session(tmp_path)
    assert str(caught.value).isprintable()
    assert_idle(llm)


def test_a_save_removes_what_a_killed_one_left(tmp_path, monkeypatch):
    llm = make_llm()
    output = first_turn(llm)
    (tmp_path / ".blocks-0123.safetensors.01234567.tmp").write_bytes(b"half a session")

    def write(file, tensors):
        assert len(list(tmp_path.iterdir())) == 1, "a file that is not locked"
        write_tensors(file, tensors)

    monkeypatch.setattr(session_files, "write_tensors", write)
    llm.save_session(output, tmp_path)
    assert {path.suffix: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}[".safetensors"] == 0o600
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("said", DAMAGE)
def test_damaged_files_are_one_error_and_change_nothing(said, tmp_path):
    llm = make_llm()
    output = first_turn(llm)
    llm.save_session(output, tmp_path)
    DAMAGE[said](tmp_path)
    cached = len(llm.engine.memory.index)
    with pytest.raises(SessionError, match=said) as caught:
        llm.restore_session(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert len(llm.engine.memory.index) == cached
    assert llm.generate(second_turn(output), GREEDY)[0].num_cached_tokens == 44
    assert_idle(llm)


def test_a_session_replaces_an_earlier_one_whole_or_not_at_all(tmp_path, monkeypatch):
    llm = make_llm()
    output = first_turn(llm)
    llm.save_session(output, tmp_path)
    [longer] = llm.generate(second_turn(output), GREEDY)

    def fails(path, content):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(session_files, "write_atomic", fails)
        with pytest.raises(SessionError, match=r"cannot be saved in .*: No space left on device"):
            llm.save_session(longer, tmp_path)
    assert make_llm().restore_session(tmp_path) == 44 and len(list(tmp_path.iterdir())) == 2
    assert llm.save_session(longer, tmp_path) == 56
    assert make_llm().restore_session(tmp_path) == 56
    assert len(list(tmp_path.iterdir())) == 2


def test_a_pool_without_room_refuses_it_with_the_numbers_and_keeps_what_runs(tmp_path):
    saving = make_llm()
    saving.save_session(first_turn(saving), tmp_path)
    llm = make_llm(num_blocks=16)
    request = llm.engine.add_request(np.array(TEXT), GREEDY)
    for _ in range(4):
        llm.engine.step()
    with pytest.raises(SessionError, match="has 11 blocks, 7 of 16 are available"):
        llm.restore_session(tmp_path)
    while llm.engine.has_work:
        llm.engine.step()
    assert [request.output().outputs[0].token_ids] == tokens_of(make_llm(), [{"prompt_token_ids": TEXT}], GREEDY)
    assert llm.restore_session(tmp_path) == 44
    assert_idle(llm)


def test_what_is_cached_already_is_shared(tmp_path):
    llm = make_llm()
    output = first_turn(llm)
    llm.save_session(output, tmp_path)
    stored = len(llm.engine.memory.device.node_of)
    assert llm.restore_session(tmp_path) == llm.restore_session(tmp_path) == 44
    assert len(llm.engine.memory.device.node_of) == stored
    assert_idle(llm)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"enable_prefix_caching": False}, "enable_prefix_caching is off"),
        ({"data_parallel_size": 2}, "data_parallel_size is 2"),
    ],
)
def test_engines_that_have_no_sessions_say_why(settings, said, tmp_path):
    llm = make_llm(**settings)
    output = first_turn(llm)
    for call in (functools.partial(llm.save_session, output), llm.restore_session):
        with pytest.raises(SessionError, match=f"this engine saves and restores no sessions: {said}, and "):
            call(tmp_path)


def test_a_path_that_cannot_be_is_named():
    llm = make_llm()
    for call in (functools.partial(llm.save_session, first_turn(llm)), llm.restore_session):
        with pytest.raises(SessionError, match=r"path is 'a\\x00b', must be a path without NUL characters"):
            call("a\0b")


def test_a_request_of_which_nothing_is_cached_is_refused(tmp_path):
    llm = make_llm()
    [output] = llm.generate({"prompt_token_ids": TEXT[:2]}, SamplingParams(max_tokens=1, detokenize=False))
    with pytest.raises(SessionError, match="nothing of request 'request-0' is cached"):
        llm.save_session(output, tmp_path)
    assert not list(tmp_path.iterdir())
