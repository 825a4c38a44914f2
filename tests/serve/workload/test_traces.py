"""Readers of traces, on files of 20 lines written for these tests."""

import json

import numpy as np
import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.workload import read_workload
from tests.serve.workload.hit_rate import infinite_hit_rate

VOCAB = 1000

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{46 + k // 2:02}.{k % 2 * 5}805900,{100 + 7 * k},{10 + k}\n" for k in range(20)
)
BURSTGPT = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
    f"{5 + 2 * k},{k // 4},1.5,ChatGPT,{50 + k},{0 if k == 7 else 20 + k},{70 + 2 * k},"
    f"{'API log' if k % 4 == 3 else 'Conversation log'}\n"
    for k in range(20)
)
# Four conversations of five turns; each turn adds one block of 512 tokens, and 100 tokens more.
MOONCAKE = "".join(
    json.dumps(
        {
            "timestamp": 1000 * k,
            "input_length": 512 * (1 + k // 4) + 100,
            "output_length": 30 + k,
            "hash_ids": [0, *(100 * (k % 4) + d for d in range(1, 1 + k // 4)), 1000 + k],
        }
    )
    + "\n"
    for k in range(20)
)
SHAREGPT = json.dumps(
    [
        {
            "id": str(k),
            "conversations": [
                *([{"from": "system", "value": "Be brief."}] if k % 5 == 0 else []),
                {"from": "human", "value": f"Question {k}? " * (k + 1)},
                {"from": "gpt", "value": f"Answer {k}. " * 3},
                {"from": "human", "value": "And then?"},
            ],
        }
        for k in range(20)
    ],
    indent=1,
)
TEXTS = {"azure": AZURE, "burstgpt": BURSTGPT, "mooncake": MOONCAKE, "sharegpt": SHAREGPT}


@pytest.fixture
def trace(tmp_path):
    """Reads a text as a trace of a kind."""

    def read(kind, text=None, **settings):
        path = tmp_path / "trace.txt"
        path.write_text(TEXTS[kind] if text is None else text, encoding="utf-8")
        return read_workload({"kind": kind, "path": str(path), **settings}).make(VOCAB)

    return read


def test_an_azure_trace_has_the_times_and_lengths_of_its_rows(trace):
    items = trace("azure").items
    assert [item.arrival_s for item in items] == pytest.approx([k / 2 for k in range(20)])
    assert [(i.num_prompt, i.num_output) for i in items] == [(100 + 7 * k, 10 + k) for k in range(20)]


def test_times_of_2024_with_a_zone_are_read(trace):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:01.5+00:00,5,1\n2024-05-10 00:00:00+00:00,7,2\n"
    assert [(i.arrival_s, i.num_prompt) for i in trace("azure", text).items] == [(0, 7), (1.5, 5)]


def test_the_trace_of_2025_is_read_without_its_images(trace):
    text = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\r\n2024-10-15T12:00:05.819Z,1,949,126\r\n"
    text += "2024-10-15T12:00:00.269Z,0,770,491"
    assert [(i.arrival_s, i.num_prompt) for i in trace("azure", text).items] == [(0, 770), (pytest.approx(5.55), 949)]


def test_a_burstgpt_trace_leaves_out_failures_and_selects_by_log_type(trace):
    made = trace("burstgpt")
    assert [i.num_prompt for i in made.items] == [50 + k for k in range(20) if k != 7]
    assert made.items[0].arrival_s == 0 and "which failed, are left out" in made.notes[0]
    assert [i.num_prompt for i in trace("burstgpt", log_type="API log").items] == [53, 61, 65, 69]


def test_the_older_burstgpt_without_sessions_is_read(trace):
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,472,18,490,API log\n"
    assert [(i.num_prompt, i.num_output) for i in trace("burstgpt", text).items] == [(472, 18)]


def test_mooncake_requests_with_equal_ids_share_full_blocks_and_nothing_else(trace):
    items = trace("mooncake").items
    one, two, later = items[0].tokens(), items[1].tokens(), items[4].tokens()
    assert np.array_equal(one[:512], two[:512]) and not np.array_equal(one[512:], two[512:612])
    assert np.array_equal(one[:512], later[:512]) and not np.array_equal(one[512:], later[512:612])
    eight = items[8].tokens()
    assert np.array_equal(eight[:1024], later[:1024]) and not np.array_equal(
        eight[512:1024], items[9].tokens()[512:1024]
    )
    # Turn d of a conversation finds d blocks; the first request of all finds none.
    found = sum(512 * (1 + (k - 4) // 4) for k in range(4, 20)) + 3 * 512
    assert infinite_hit_rate(trace("mooncake"), 512) == pytest.approx(found / sum(i.num_prompt for i in items))


def test_a_last_block_is_the_requests_own_even_if_its_id_is_not(trace):
    rows = [{"timestamp": k, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]} for k in (0, 1)]
    one, two = (item.tokens() for item in trace("mooncake", "\n".join(map(json.dumps, rows))).items)
    assert np.array_equal(one[:512], two[:512]) and not np.array_equal(one[512:], two[512:])


def test_mooncake_on_a_small_model_keeps_what_is_shared(trace):
    small = trace("mooncake", length_scale=1 / 16)
    assert [i.num_prompt for i in small.items][:5] == [38, 38, 38, 38, 70]
    assert infinite_hit_rate(small, 32) == pytest.approx(infinite_hit_rate(trace("mooncake"), 512), abs=0.01)


def test_sharegpt_has_first_questions_and_answers_and_drawn_times(trace):
    made = trace("sharegpt", rate=4.0)
    assert [i.num_prompt for i in made.items[:3]] == [-(-len(f"Question {k}? " * (k + 1)) // 4) for k in range(3)]
    assert len(made.items) == 20 and made.rate == pytest.approx(4.0)


def test_sharegpt_is_made_of_the_models_tokens(tmp_path):
    (path := tmp_path / "chats.json").write_text(SHAREGPT)
    made = read_workload({"kind": "sharegpt", "path": str(path)}).make(VOCAB, lambda text: [*text.encode()])
    assert made.name == "chats" and bytes(made.items[0].tokens().tolist()) == b"Question 0? "


@pytest.mark.parametrize("kind", ["azure", "burstgpt", "mooncake"])
def test_traces_are_scaled_cut_and_jittered(trace, kind):
    plain, fast = trace(kind), trace(kind, rate=8.0)
    assert fast.rate == pytest.approx(8.0) and trace(kind, num_requests=5).describe()["num_requests"] == 5
    assert fast.arrivals == pytest.approx(plain.arrivals * plain.rate / 8.0)
    assert max(i.num_prompt for i in trace(kind, max_prompt=60).items) == 60
    shaken = trace(kind, jitter_s=0.3)
    assert shaken.describe()["distinct_arrivals"] == len(shaken.items)
    assert np.abs(shaken.arrivals - plain.arrivals).max() < 0.6 and (shaken.arrivals != plain.arrivals).any()
    for item in plain.items:
        assert len(item.tokens()) == item.num_prompt and len(item.output_tokens()) == item.num_output


# (kind, text to replace, by what, error); the whole text where there is nothing to replace
WRONG = [
    ("azure", ",107,", ",many,", "trace.txt, line 3: ContextTokens is 'many', must be an integer from 1"),
    ("azure", ",107,", ",-7,", "line 3: ContextTokens is '-7', must be an integer from 1"),
    ("azure", ",107,", ",107,9,", "line 3: 4 fields, line 1 names 3"),
    ("azure", "2023-11-16 18:15:46.0", "16.11.2023", "line 2: TIMESTAMP is '16.11.2023805900', must be a time such as"),
    ("azure", "GeneratedTokens", "Output", "line 1: there is no column 'GeneratedTokens'; it has TIMESTAMP"),
    ("azure", "", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
    ("burstgpt", "\n7,", "\nnan,", "line 3: Timestamp is 'nan', must be a number of seconds"),
    ("burstgpt", ",51,", f",{10**30},", "line 3: Request tokens is '10000"),
    ("mooncake", '"output_length": 31', '"output": 31', "line 2: there is no field 'output_length'"),
    ("mooncake", '_length": 612', '_length": "612.5"', "line 1: input_length is '612.5', must be an integer from 1"),
    ("mooncake", "[0, 1000]", "[0]", "line 1: hash_ids has 1 ids, input_length 612 needs 2"),
    ("mooncake", "[0, 1000]", "[0, true]", "line 1: hash_ids is .*, must be a list of integers"),
    ("mooncake", '"timestamp": 0', '"timestamp": NaN', "line 1: timestamp is nan, must be a finite number from 0"),
    ("mooncake", "{", "{{", "line 1: not JSON"),
    ("mooncake", "", "[" * 100_000, "line 1: not JSON"),
    ("mooncake", "", "7", "line 1: 7, must be an object"),
    ("sharegpt", 'value": "Answer 0.', 'text": "Answer 0.', "conversation 1, turn 3: 'value' is None, must be a text"),
    ("sharegpt", "", SHAREGPT[:-3], "trace.txt, line [0-9]+: not JSON"),
    ("sharegpt", "", '[{"id": 1}]', "conversation 1: there is no list 'conversations'"),
    ("sharegpt", "", "{}", "must be a list of conversations"),
    ("sharegpt", "", "[]", "has no question with an answer"),
    ("sharegpt", "", "[" * 100_000, "nested too deeply to be read"),
]


@pytest.mark.parametrize("kind, old, new, message", WRONG, ids=[f"{w[0]}-{n}" for n, w in enumerate(WRONG)])
def test_an_error_names_the_file_the_line_and_the_field(trace, kind, old, new, message):
    assert old in TEXTS[kind]
    with pytest.raises(ConfigError, match=message):
        trace(kind, TEXTS[kind].replace(old, new, 1) if old else new)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.csv cannot be read: No such file"):
        read_workload({"kind": "azure", "path": str(tmp_path / "none.csv")}).make(VOCAB)
    (path := tmp_path / "latin.csv").write_bytes(b"TIMESTAMP,\xff\xfe")
    with pytest.raises(ConfigError, match=r"latin\.csv is not a text in UTF-8"):
        read_workload({"kind": "azure", "path": str(path)}).make(VOCAB)
    with pytest.raises(ConfigError, match="path is '', must name a file"):
        read_workload("mooncake")
    with pytest.raises(ConfigError, match="must be whole"):
        read_workload({"kind": "mooncake", "path": "x", "length_scale": 0.3})


def test_reading_stops_at_the_rows_asked_for(trace):
    assert len(trace("azure", AZURE + "garbage\n", num_requests=20).items) == 20
