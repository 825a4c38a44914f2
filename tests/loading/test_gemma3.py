"""The second model that `ksana fetch` has, with trained sliding windows, loads and continues a list."""

import pytest

from ksana_jax import LLM, SamplingParams
from tests import real


@real.gemma3
@pytest.mark.soak
def test_model_continues_a_list_past_its_window_as_before_it():
    llm = LLM("gemma3-270m", max_model_len=2048, max_num_batched_tokens=256, max_num_seqs=1)
    asked = SamplingParams(max_tokens=6, temperature=0)
    for count in (40, 200):  # of about four tokens each: 200 lines are longer than a window of 512 tokens
        [output] = llm.generate(["".join(f"{number}.\n" for number in range(1, count + 1))], asked)
        assert output.outputs[0].text.startswith(f"{count + 1}.")
