"""Generation settings of tasks become sampling parameters; stop strings end the text."""

import pytest

from ksana_jax import SamplingParams
from ksana_jax.lab.evaluation.generation import cut, prompt_room, sampling_params, stop_strings


@pytest.mark.parametrize(
    "given, wanted",
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {}),
        ({"temperature": 0, "num_beams": 1, "top_k": None}, {}),
        ({"until": ["\n", ""], "max_gen_toks": 5}, {"stop": ["\n"], "max_tokens": 5}),
        ({"until": "Q:", "max_tokens": 7, "max_new_tokens": 6}, {"stop": ["Q:"], "max_tokens": 6}),
        ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 5}, {"temperature": 1.0, "top_k": 5}),
        ({"do_sample": True, "temperature": 0.5, "seed": 3}, {"temperature": 0.5, "seed": 3}),
    ],
)
def test_settings_become_sampling_parameters(given, wanted):
    assert sampling_params(given, 256) == SamplingParams(**{"temperature": 0.0, "max_tokens": 256} | wanted)


def test_unsupported_settings_are_refused():
    with pytest.raises(ValueError, match="num_beams is 4, supported: 1"):
        sampling_params({"num_beams": 4}, 256)
    with pytest.raises(ValueError, match="no setting 'typical_p'"):
        sampling_params({"typical_p": 0.5}, 256)
    with pytest.raises(ValueError, match="until is 5, must be a string or a list of strings"):
        stop_strings({"until": 5})


def test_more_stop_strings_than_the_engine_takes_still_end_the_text():
    until = [f"<{i}>" for i in range(40)] + ["x" * 300]
    params = sampling_params({"until": until}, 8)
    assert len(params.stop_strings) == 16
    assert cut("a<39>b<3>c", until) == "a" and cut("a" + "x" * 300, until) == "a"
    assert cut("abc", []) == "abc" == cut("abc", ["d"])


def test_a_prompt_leaves_room_for_the_output():
    assert prompt_room(100, 99) == 1
    with pytest.raises(ValueError, match="max_gen_toks is 256, must be below max_model_len 256"):
        prompt_room(256, 256)
