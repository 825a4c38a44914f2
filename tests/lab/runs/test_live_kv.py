"""The KV that the perplexity task reports: what a text holds, whatever the chunk."""

import json

import pytest

from ksana_jax.lab.runs.report import report
from ksana_jax.lab.runs.tasks.perplexity import Perplexity
from tests.lab.runs.perplexity_runs import VARIANTS, row
from tests.lab.runs.perplexity_runs import experiment as experiment
from tests.lab.runs.perplexity_runs import measured as measured
from tests.lab.runs.runs import reported


def test_kv_bytes_are_those_of_the_blocks_in_use(measured):
    _, made, _ = measured
    full, sliding = row(made, "full"), row(made, "sliding")
    # 128 tokens in blocks of 4.
    assert full.mean("live_kv_bytes") == full.mean("peak_kv_bytes") == 32 * 1024
    # The 7 tokens before the next one lie in 2 blocks; within a step, its 16 come in 4 more.
    assert sliding.mean("live_kv_bytes") == 2 * 1024
    assert sliding.mean("peak_kv_bytes") == 6 * 1024
    assert row(made, "sinks").mean("live_kv_bytes") == 3 * 1024
    assert row(made, "recompute").mean("live_kv_bytes") is None
    # A window of 8 and the token that it predicts.
    assert row(made, "recompute").mean("peak_kv_bytes") == 3 * 1024


@pytest.mark.parametrize("chunk", [1, 5, 16, 64, 200])
@pytest.mark.parametrize("num_tokens", [128, 90])
def test_live_kv_is_what_a_text_holds_at_its_end_whatever_the_chunk(
    experiment, make_llm, tmp_path, text, chunk, num_tokens
):
    engine = {"block_size": 4, "max_num_batched_tokens": chunk, "max_num_seqs": 1}
    settings = {"texts": [text], "num_texts": 1, "num_tokens": num_tokens}
    given = experiment(variants=VARIANTS[:3], engine=engine, settings=settings)
    made = reported(given, tmp_path / "out", make_llm=make_llm)
    blocks = {r.label: (r.mean("live_kv_bytes") or 0) / 1024 for r in made.rows}
    # The query after 90 tokens attends to those from 83 on; that after 128, those from 121 on.
    assert blocks == {
        "full": -(-num_tokens // 4),
        "sliding": 3 if num_tokens == 90 else 2,
        "sinks": blocks["sliding"] + 1,
    }
    for r in made.rows:
        (kv,) = [m for m in r.trials[0] if m["metric"] == "kv"]
        assert (kv["position"][-1], kv["live_blocks"][-1]) == (num_tokens, kv["held_blocks"])


def test_a_text_that_fits_one_step_holds_what_its_pattern_keeps(experiment, make_llm, tmp_path, text):
    from matplotlib.figure import Figure

    settings = {"texts": [text], "num_texts": 1, "num_tokens": 15}
    made = reported(experiment(settings=settings), tmp_path / "out", make_llm=make_llm)
    assert made.conclusion == "At positions 0 to 14 'this configuration' has a perplexity of 3.43, with 4 KiB of KV."
    figure = Figure()
    Perplexity().draw(figure, made.rows)
    assert [line.get_xydata().tolist() for line in figure.axes[1].lines] == [[[15, 4]]]  # 15 tokens in blocks of 4
    grid = {"pattern.window": [4, 8], "pattern.num_sinks": [0, 1]}
    made = reported(experiment(settings=settings, grid=grid), tmp_path / "grid", make_llm=make_llm)
    assert [r.mean("live_kv_bytes") for r in made.rows] == [1024, 2048, 2048, 3072]
    assert {r.mean("peak_kv_bytes") for r in made.rows} == {4096}
    assert (tmp_path / "grid/figure.pdf").stat().st_size > 0


def test_live_kv_of_earlier_records_is_said_to_lack_the_last_chunk(measured):
    folder, _, _ = measured
    path = folder / "records.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("metric") == "kv" and line["method"] == "stream":
            del line["held_blocks"], line["position"][-1], line["live_blocks"][-1]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = report(folder)
    assert row(made, "full").mean("live_kv_bytes") == 28 * 1024
    assert any("between steps, without its last chunk; of a text of one step" in note for note in made.notes)
    assert (folder / "figure.pdf").stat().st_size > 0
