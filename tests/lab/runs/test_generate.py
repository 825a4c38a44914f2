"""The generate task against an engine whose clock ticks once for each event."""

import pytest

from ksana_jax.lab.runs.config import plan
from tests.lab.runs.runs import reported


@pytest.fixture
def measured(model, text, make_llm, tmp_path):
    settings = {"texts": [text], "num_prompts": 3, "prompt_tokens": 24, "output_tokens": 6}
    engine = {"block_size": 4, "max_num_batched_tokens": 8}
    variants = [{"name": "full"}, {"name": "sliding", "pattern.window": 8}]
    given = {"task": "generate", "model": model, "engine": engine, "settings": settings, "variants": variants}
    return tmp_path / "out", reported(plan(given), tmp_path / "out", make_llm=make_llm)


def test_speed_and_blocks_stand_in_one_row(measured):
    _, made = measured
    full, sliding = made.rows
    for row in made.rows:
        assert row.mean("compiled_while_timed") == 0
        assert row.mean("tokens_per_s") > 0
        # Three steps of 8 tokens; the first token comes with the end of the third.
        assert row.mean("ttft_s") == pytest.approx(0.003)
        assert row.mean("tpot_s") > 0
    # 29 tokens are computed in all.
    assert full.mean("live_kv_bytes") == full.mean("peak_kv_bytes") == 8 * 1024
    assert sliding.mean("live_kv_bytes") == 3 * 1024


@pytest.mark.parametrize("chunk", [3, 8, 40])
@pytest.mark.parametrize("output_tokens", [1, 6])
def test_live_kv_of_one_request_does_not_depend_on_the_chunk(model, text, make_llm, tmp_path, chunk, output_tokens):
    settings = {"texts": [text], "num_prompts": 1, "prompt_tokens": 26, "output_tokens": output_tokens}
    variants = [{"name": "full"}, {"name": "sliding", "pattern.window": 8}]
    engine = {"block_size": 4, "max_num_batched_tokens": chunk, "max_num_seqs": min(chunk, 8)}
    given = {"task": "generate", "model": model, "engine": engine, "settings": settings, "variants": variants}
    full, sliding = reported(plan(given), tmp_path, make_llm=make_llm).rows
    assert full.mean("live_kv_bytes") == 1024 * (7 if output_tokens == 1 else 8)
    # The query after 26 tokens attends to those from 19 on, that after 27 those from 20 on.
    assert sliding.mean("live_kv_bytes") == 1024 * 3


def test_prompts_start_with_bos_and_have_the_length_asked_for(measured):
    _, made = measured
    requests = [m for m in made.rows[0].trials[0] if m["metric"] == "request"]
    assert [m["num_prompt_tokens"] for m in requests] == [24, 24, 24]
    assert [m["num_output_tokens"] for m in requests] == [6, 6, 6]


def test_random_prompts_need_no_tokenizer(model, make_llm, tmp_path, monkeypatch):
    monkeypatch.setattr("ksana_jax.lab.runs.texts.cut_prompts", None)
    settings = {"random_prompts": True, "num_prompts": 2, "prompt_tokens": 24, "output_tokens": 6}
    given = {"task": "generate", "model": model, "engine": {"block_size": 4}, "settings": settings, "seeds": [0, 1]}
    (row,) = reported(plan(given), tmp_path / "out", make_llm=make_llm).rows
    assert [m["num_prompt_tokens"] for m in row.trials[0] if m["metric"] == "request"] == [24, 24]
    # A block of 4 tokens has 1,024 bytes; the fake engine runs one request at a time.
    assert row.mean("kv_token_bytes") == 256 and row.mean("max_running") == 1
