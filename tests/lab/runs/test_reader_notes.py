"""Tables, run.json and dry runs say when sequences are longer than those that the model was trained for, and when a
budget leaves an eviction method nothing to choose."""

import json

import pytest

from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.models import reader_notes
from tests.lab.runs.runs import reported


@pytest.mark.parametrize("num_tokens", [256, 257])
def test_sequences_beyond_the_training_of_a_model_are_noted(num_tokens, make_llm, run_ksana, tmp_path):
    (tmp_path / "long.txt").write_text("0123456789" * 60)
    engine = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 1}
    settings = {"texts": [str(tmp_path / "long.txt")], "num_texts": 1, "num_tokens": num_tokens, "bucket_tokens": 64}
    given = {"model": "ksana-tiny", "engine": engine, "settings": settings}
    made = reported(plan(given), tmp_path, make_llm=make_llm)
    notes = [note for note in made.notes if note.startswith("Beyond training: max_model_len is 258, the model")]
    assert len(notes) == (num_tokens > 256)
    assert json.loads((tmp_path / "run.json").read_text())["notes"] == notes
    (tmp_path / "x.yaml").write_text(json.dumps(given))
    dry = run_ksana("run", tmp_path / "x.yaml", "--dry-run", "--out", tmp_path / "dry")[2]
    shown = [(tmp_path / "table.md").read_text(), (tmp_path / "table.tex").read_text(), " ".join(dry.split())]
    assert {"Beyond training" in text and "trained for 256 positions" in text for text in shown} == {num_tokens > 256}


@pytest.mark.parametrize(("budget", "said"), [(44, None), (43, "choose at most 3, at times none"), (32, "at most 0")])
def test_budgets_that_the_tokens_that_always_stay_may_fill_are_noted(budget, said):
    eviction = {"method": "h2o", "budget": budget, "sinks": 8, "recent": 32, "prompts": "streamed"}
    given = {"model": "ksana-tiny", "engine": {"block_size": 4, "kv_eviction": eviction}}
    given["settings"] = {"num_tokens": 128}
    notes = reader_notes(trial.config for trial in plan(given).trials)
    assert len(notes) == (said is not None)
    if said is not None:
        assert (
            notes[0].startswith(f"h2o: of a budget of {budget} tokens, 8 sinks and 32 newest always stay")
            and said in notes[0]
        )
