"""Several devices verify drafts with the tokens of one device without drafts."""

import numpy as np
import pytest

from tests.guessing import ANSWERS
from tests.sharding.on_devices.engines import PROMPTS, VOCAB, expected, make_llm, tokens_of

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.soak
@pytest.mark.parametrize(("name", "num_devices"), [("GQA", 8), ("MQA", 4)])
def test_drafts_that_are_right_at_first(name, num_devices):
    ANSWERS.clear()
    for prompt, tokens in zip(PROMPTS, expected(name), strict=True):
        ANSWERS[np.array(prompt["prompt_token_ids"], np.int32).tobytes()] = [tokens]
    drafts = {"method": "tests.guessing:Guessing", "guesses": "right at first", "vocab_size": VOCAB}
    llm = make_llm(name, num_devices, speculative_config=drafts | {"num_speculative_tokens": 3})
    assert tokens_of(llm) == expected(name)
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    counts = speculation.counts
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
