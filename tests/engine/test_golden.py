"""Every family through the paged engine, against transformers' results (files in tests/golden)."""

import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from tests.golden.cases import golden_cases
from tests.soak import soak_unless

# Two float32 implementations that add in different orders; log-probabilities here reach down to -25.
ATOL = 1e-4
CASES = list(golden_cases())
QUICK = {case.name for case in CASES[::4]} | {case.name for case in CASES if case.name.startswith("mistral4")}
# Each case meets one block size, each family all three.
BLOCK_SIZES = [(case, (8, 16, 64)[i % 3]) for i, case in enumerate(CASES)]


@pytest.mark.parametrize(
    ("case", "block_size"),
    soak_unless(lambda pair: pair[0].name in QUICK, BLOCK_SIZES),
    ids=[f"{c.name}-{b}" for c, b in BLOCK_SIZES],
)
def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(case, block_size):
    # 70 tokens in chunks of up to 24, the three prompts and their decode steps mixed.
    llm = LLM(case.model_dir, block_size=block_size, max_num_seqs=3, max_num_batched_tokens=24, query_tile=12)
    asked = SamplingParams(
        temperature=0, max_tokens=len(case.greedy[0]), prompt_logprobs=20, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in case.prompts], asked)
    for output, prompt, logprobs, greedy in zip(outputs, case.prompts, case.logprobs, case.greedy, strict=True):
        assert output.outputs[0].token_ids == greedy.tolist()
        reported = output.prompt_logprobs or []
        assert len(reported) == len(prompt) and reported[0] is None
        for position, entry in enumerate(reported[1:]):
            ids = list(entry)
            assert len(ids) >= 20 and int(prompt[position + 1]) in entry
            np.testing.assert_allclose(
                [entry[i].logprob for i in ids], logprobs[position, ids], atol=ATOL, rtol=0, err_msg=f"at {position}"
            )


def test_decoded_tokens_have_the_distributions_that_transformers_reads():
    case = next(c for c in CASES if c.name == "mistral-gqa")
    llm = LLM(case.model_dir, block_size=8, max_num_seqs=3, max_num_batched_tokens=24, query_tile=12)
    prompt, logprobs = max(zip(case.prompts, case.logprobs, strict=True), key=lambda pair: len(pair[0]))
    asked = SamplingParams(forced_token_ids=prompt[2:].tolist(), max_tokens=None, logprobs=-1, detokenize=False)
    [output] = llm.generate({"prompt_token_ids": prompt[:2]}, asked)
    np.testing.assert_allclose(output.outputs[0].distributions, logprobs[1:-1], atol=ATOL, rtol=0)


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_block_and_chunk_size_do_not_change_a_grouped_query_model(block_size):
    case = next(c for c in CASES if c.name == "mistral-gqa")
    llm = LLM(case.model_dir, block_size=block_size, max_num_seqs=3, max_num_batched_tokens=128, query_tile=32)
    asked = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in case.prompts], asked)
    assert [o.outputs[0].token_ids for o in outputs] == [g.tolist() for g in case.greedy]
