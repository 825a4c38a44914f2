"""Programs of several devices from the store: the tokens of compiled ones."""

import logging

import jax
import pytest

from ksana_jax.runner import store
from tests.sharding.on_devices.engines import GREEDY, PROMPTS, make_llm


@pytest.mark.cpu("programs of CPUs are stored")
def test_two_devices_compute_the_same_tokens_with_stored_programs(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "programs"))
    caplog.set_level(logging.INFO, logger="ksana_jax")
    answers = []
    for switch in ("off", "on", "on"):
        jax.clear_caches()
        caplog.clear()
        monkeypatch.setenv(store.SWITCH, switch)
        outputs = make_llm(num_devices=2).generate(PROMPTS, GREEDY)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1] == answers[2]
    assert "found StepShape" in caplog.text and " traced in " not in caplog.text
