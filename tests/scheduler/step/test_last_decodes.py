"""Decode steps that follow from the previous one; `tests.fakes.CheckedBuilder` compares each with one made from the
rows alone."""

import numpy as np
import pytest

from tests.fakes import FULLY, SINKS, asking, make_engine, prompt_of, reference_tokens, run, step

ENGINES = {
    "async": {"async_scheduling": True},
    "step by step": {},
    "three steps a call": {"num_scheduler_steps": 3, "async_scheduling": True},
    "prefix cache": {"caching": True, "async_scheduling": True},
    "padded": {"max_num_seqs": 7},
}


@pytest.mark.parametrize("settings", ENGINES.values(), ids=ENGINES)
def test_decode_steps_of_the_same_rows_take_over_the_tables(settings):
    engine = make_engine(**settings)
    requests = [engine.add_request(prompt_of(3 + number, number), asking(30)) for number in range(3)]
    run(engine)
    assert engine.builder.num_following >= 25
    for request in requests:
        assert request.output().outputs[0].token_ids == reference_tokens(request.prompt_token_ids, 30, FULLY)


def test_sampling_settings_are_taken_over_and_the_random_stream_goes_on():
    engine = make_engine(max_num_seqs=3)
    for number in range(3):
        engine.add_request(prompt_of(3 + number, number), asking(12, temperature=0.5, top_k=number, seed=number))
    run(engine)
    assert engine.builder.num_following >= 9
    outputs = [given.sampling.num_outputs for given in engine.executor.steps if len(given.shape.parts) == 1]
    assert (np.diff(outputs, axis=0)[:, :2] == 1).all()


def test_tables_grow_beyond_their_bucket():
    engine = make_engine(max_num_seqs=2, max_model_len=400, num_blocks=220)
    assert engine.builder.buckets.widths == (64, 100)
    request = engine.add_request(prompt_of(240), asking(60))
    run(engine)
    assert {given.shape.table_width for given in engine.executor.steps} == {64, 100}
    assert engine.builder.num_following > 50
    assert request.output().outputs[0].token_ids == reference_tokens(request.prompt_token_ids, 60, FULLY)


def test_tables_of_which_blocks_are_returned_are_made_again():
    engine = make_engine(patterns=SINKS, block_size=2)
    engine.add_request(prompt_of(9), asking(30))
    run(engine)
    assert 0 < engine.builder.num_following < 25


def test_a_step_under_way_keeps_what_it_sees():
    engine = make_engine(max_num_seqs=2, num_scheduler_steps=4, async_scheduling=True)
    for number in range(2):
        engine.add_request(prompt_of(4, number), asking(30))
    seen = {}
    while engine.has_work:
        step(engine)
        for given in engine.executor.steps:
            a = given.arrays
            if given.shape.num_tiles == given.shape.num_tokens:  # decodes, one to a tile
                visible = a.block_starts <= a.cache_positions[:, :, None]
                now = np.where(visible, a.block_tables, -1), np.where(visible, a.block_starts, -1), a.slots, a.positions
                before = seen.setdefault(id(given), [x.copy() for x in now])
                assert all(map(np.array_equal, before, now))
    assert engine.builder.num_following > 20
