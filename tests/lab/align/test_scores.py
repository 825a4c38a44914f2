"""Files of log-probabilities, and the differences of two sides. No engine."""

import json
from typing import Any

import numpy as np
import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.align import scores
from ksana_jax.lab.align.command import operator_rows, report
from ksana_jax.lab.align.scores import Scores

MINE = Scores([[5, 6, 7], [5, 8]], [1, 2], [np.array([-1.5, -0.25]), np.array([-3.0])])


def test_a_file_is_read_as_it_was_written(tmp_path):
    MINE.write(tmp_path / "mine.json")
    again = scores.read(tmp_path / "mine.json")
    assert (again.token_ids, again.num_prompt_tokens) == (MINE.token_ids, MINE.num_prompt_tokens)
    assert all(map(np.array_equal, again.logprobs, MINE.logprobs))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logprobs": [[None, -1.5]]}, "2 sequences, 2 lengths of prompts, 1 logprobs"),
        ({"logprobs": [[None, -1.5], [None, -3.0]]}, "sequence 0 has 3 tokens, 1 of a prompt, 2 logprobs"),
        ({"num_prompt_tokens": [4, 2]}, "sequence 0 has 3 tokens, 4 of a prompt"),
        ({"token_ids": 3}, "is not a file of log-probabilities: TypeError"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, changed, message):
    MINE.write(path := tmp_path / "mine.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ConfigError, match=message):
        scores.read(path)


def test_the_first_difference_and_quantiles_are_those_of_the_numbers():
    a = [np.array([-1.0, -2.0, -3.0]), np.array([-1.0, -1.0])]
    b = [np.array([-1.0, -2.0, -3.5]), np.array([-1.0, -0.75])]
    found = scores.differences(a, b)
    assert (found["count"], found["identical"], found["mean"]) == (5, 3, pytest.approx(-0.05))
    assert found["first"] == {"text": 1, "token": 2, "a": -1.0, "b": -0.75}
    assert found["quantiles"]["0.5"] == 0.0 and found["quantiles"]["1"] == 0.5
    assert scores.differences(a, a)["first"] is None
    assert scores.first_other_tokens(MINE, [[5, 6, 9], [5, 8]]) == {0: 1}


def test_a_report_names_token_and_operator():
    a, b = [np.array([-1.0, -2.0])], [np.array([-1.0, -2.5])]
    operators = [
        {"name": "layers.0.w_q", "own": 0.0, "before": 0.0, "total": 0.0},
        {"name": "layers.0.w_o", "own": 0.25, "before": 0.0, "total": 0.25},
        {"name": "layers.1.w_o", "own": 0.5, "before": 0.0, "total": 1.0},
    ]
    found: dict[str, Any] = {"num_texts": 1, "tokens": {0: 3}, "logprobs": scores.differences(a, b)}
    found |= {"operators": operators, "divided": None}
    lines = report(found)
    assert lines[0] == "1 of 1 sequences have other greedy tokens; the first, of sequence 0, is output token 3"
    assert "the first that differs is that of token 2 of sequence 0: -2 and -2.5" in lines
    assert lines[-1] == "the first operator that differs is layers.0.w_o"
    assert operator_rows(operators) == [["layers.0.w_q", "0", "0", "0"], ["layers.1.w_o", "5.0e-01", "0", "1.0e+00"]]
    operators[0]["before"] = 1.0
    assert report(found)[-1] == "the first operator that differs is what comes before layers.0.w_q"
