"""Recordings with invalid content: an error names the line and the value."""

import json

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.recording import read

STEP = {"event": "step", "ended_s": 1.0, "shape": [[[1, 1]], 4, 1]} | dict.fromkeys(
    ("num_tokens", "num_decodes", "num_running", "num_waiting", "blocks_in_use", "peak_blocks", "num_preemptions"), 1
)


@pytest.mark.parametrize(
    ("header", "step", "says"),
    [
        ([], STEP, " is not a recording"),
        ({"event": "recording"}, STEP, " is a recording of format None, this version reads 2"),
        (None, {}, ", line 3 is {}, must be an event"),
        (None, [], ", line 3 is [], must be an event"),
        (None, 5, ", line 3 is 5, must be an event"),
        (None, {"event": "step"}, ", line 3: there is no field 'ended_s'"),
        (None, {k: v for k, v in STEP.items() if k != "shape"}, ", line 3: there is no field 'shape'"),
        (None, STEP | {"shape": 3}, ", line 3: shape is 3, must be the shape of a step"),
        (None, STEP | {"num_tokens": "many"}, ", line 3: num_tokens is 'many', must be a finite number"),
        (None, STEP | {"ended_s": float("nan")}, ", line 3: ended_s is nan, must be a finite number"),
    ],
)
def test_broken_lines_of_steps_are_named(tmp_path, header, step, says):
    path = tmp_path / "steps.jsonl"
    good = {"event": "recording", "format": 2}
    path.write_text("\n".join(map(json.dumps, [good, STEP])))
    assert len(read(path).records()) == 1
    path.write_text("\n".join(map(json.dumps, [good if header is None else header, STEP, step])))
    with pytest.raises(ConfigError) as raised:
        read(path).records()
    assert str(raised.value) == f"{path}{says}"
