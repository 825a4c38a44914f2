"""Two texts with 40 tokens in common, an engine's settings for them, and the dense float64 model's answers."""

import numpy as np

from ksana_jax import SamplingParams
from tests.engine.small import VOCAB
from tests.reference import reference_logprobs

BLOCK, LONGEST = 4, 96
SETTINGS = {
    "block_size": BLOCK,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "query_tile": 8,
    "max_model_len": LONGEST,
}
_rng = np.random.default_rng(2)
TEXT = _rng.integers(2, VOCAB, LONGEST)
PROMPTS = [TEXT[:60].tolist(), TEXT[:40].tolist() + _rng.integers(2, VOCAB, 12).tolist()]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)


def dense_greedy(config, params, pattern, count: int = 16) -> list[list[int]]:
    """Returns greedy tokens of the dense model after each of `PROMPTS`."""
    found = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(count):
            text.append(int(reference_logprobs(params, config, np.array(text), pattern)[-1].argmax()))
        found.append(text[len(prompt) :])
    return found
