"""How sinks emerge is read from the logs of training runs, finished or not."""

import json

import pytest

from experiments.trained_sinks.emergence import main


def log(folder, records):
    folder.mkdir()
    (folder / "train_log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def evaluation(step, sink_1, **more):
    measured = {"heldout_loss": 3.0, "sink_1": sink_1, "first_token_attention": [0.1, 0.2]}
    return {"step": step, "tokens": step * 4096, "loss": 3.1, **measured, **more}


def test_evaluations_of_all_models_are_tabled_drawn_and_kept(tmp_path, capsys):
    log(tmp_path / "bos", [evaluation(250, 0.01), {"step": 300, "loss": 2.0}, evaluation(500, 0.25)])
    log(tmp_path / "learned", [evaluation(250, 0.0, sink_logit_attention=[0.2, 0.4])])
    log(tmp_path / "plain", [{"step": 50, "loss": 5.0}])  # not evaluated yet
    main(str(tmp_path), str(tmp_path / "out"))
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| bos | 2.0 | 3.000 | 0.250 | — |",
        "| learned | 1.0 | 3.000 | 0.000 | 0.300 |",
    ]
    kept = [json.loads(line) for line in (tmp_path / "out" / "emergence.jsonl").read_text().splitlines()]
    assert [(record["model"], record["step"]) for record in kept] == [("bos", 250), ("bos", 500), ("learned", 250)]
    assert "loss" not in kept[0]
    assert (tmp_path / "out" / "emergence.png").stat().st_size > 1000


def test_a_folder_without_models_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="no evaluation of any model"):
        main(str(tmp_path), str(tmp_path / "out"))
