"""The engine's log at INFO: the model loaded, the size of its pool, its compilations and their seconds."""

import logging
import re

from ksana_jax import LLM, SamplingParams


def test_loading_pool_and_compilations_are_logged_at_info_only(caplog):
    with caplog.at_level(logging.INFO, logger="ksana_jax"):
        llm = LLM("ksana-tiny", max_num_seqs=2, max_model_len=64, block_size=16)
        llm.generate("def f(", SamplingParams(temperature=0, max_tokens=2))
    messages = [r.getMessage() for r in caplog.records if r.name == "ksana_jax"]
    assert all(r.levelno == logging.INFO for r in caplog.records if r.name == "ksana_jax")
    loaded, pool, *compiled = messages
    assert re.fullmatch(r"loaded .*ksana-tiny from 1 file: 1,967,808 weights, 7,871,232 bytes, in \d+\.\d s", loaded)
    kib = llm.num_blocks * llm.block_bytes / 2**10
    assert (
        pool == f"KV pool: {llm.num_blocks} blocks of 16 tokens, {kib:.1f} KiB; room for {llm.num_blocks * 16} tokens"
    )
    found = r"compiled (.*) in \d+\.\d\d s, traced in \d+\.\d\d s|found (.*) compiled"
    keys = [re.fullmatch(found, message) for message in compiled]
    # What is logged is what `programs` holds, under the same names.
    assert [key and (key[1] or key[2]) for key in keys] == [str(key) for key in llm.runner.programs]


def test_random_weights_are_not_called_loaded(caplog):
    with caplog.at_level(logging.INFO, logger="ksana_jax"):
        LLM("ksana-tiny", load_format="dummy", max_num_seqs=1)
    text = " ".join(caplog.messages)
    assert "drew random weights: 1,967,808 weights" in text and "loaded" not in text
