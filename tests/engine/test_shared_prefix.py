"""Attention over blocks that rows share runs once for all of them, and only the clock shows it."""

import dataclasses

import numpy as np
import pytest

from ksana_jax import AttentionPattern, SamplingParams
from ksana_jax.core.patterns import FAR
from ksana_jax.scheduler.step.shared_prefix import SHARED_ROWS, find_shared_runs, split_tables
from tests.engine.small import VOCAB, make_llm, model
from tests.reference import reference_logprobs

pytestmark = pytest.mark.usefixtures("few_shapes")

PATTERNS = {
    "full": AttentionPattern(),
    "sliding": AttentionPattern(window=20),
    "sinks": AttentionPattern(window=20, num_sinks=3, sink_position="absolute"),
    "StreamingLLM": AttentionPattern(window=20, num_sinks=3, sink_position="cache"),
    "LM-Infinite": AttentionPattern(window=20, num_sinks=5, sink_position="ceiling", sink_ceiling=9),
    "dilated": AttentionPattern(window=26, stride=2),
    "global": AttentionPattern(window=7, global_every=5),
}
SETTINGS = {"block_size": 4, "num_blocks": 200, "max_num_seqs": 12, "enable_prefix_caching": True}


def make_sharing_llm(**settings):
    llm = make_llm(shared_prefix_attention=True, **SETTINGS | settings)
    # These texts are short: let them share whatever they can.
    llm.engine.builder = dataclasses.replace(llm.engine.builder, min_saved_tokens=1)
    return llm


def watch(llm):
    """The shared tables of every step that has some."""
    seen, execute = [], llm.runner.submit

    def spy(step):
        starts = step.arrays.shared_starts
        if starts is not None and (starts < FAR).any():
            seen.append(starts)
        return execute(step)

    llm.engine.executor.submit = spy
    return seen


@pytest.mark.parametrize("name", PATTERNS)
def test_rows_that_share_a_prefix_score_as_the_dense_definition_says(name):
    config, params = model()
    pattern = PATTERNS[name]
    llm = make_sharing_llm(max_repositioned_sinks=8)
    llm.set_pattern(pattern)
    shared_tables = watch(llm)
    rng = np.random.default_rng(0)
    begin = rng.integers(2, VOCAB, 24)
    texts = [np.concatenate([begin, rng.integers(2, VOCAB, n)]) for n in (1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 9)]
    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], asked)
    assert shared_tables, "nothing was shared, so nothing was tested"
    for text, output in zip(texts, outputs, strict=True):
        [given] = output.outputs
        whole = np.concatenate([text, given.token_ids])
        expected = reference_logprobs(params, config, whole, pattern)[len(text) - 1 : -1]
        assert given.token_ids == expected.argmax(-1).tolist()
        got = [entry[token].logprob for entry, token in zip(given.logprobs, given.token_ids, strict=True)]
        # float32 against float64 through two layers: 1e-4 is the contract of all patterns.
        np.testing.assert_allclose(got, expected.max(-1), atol=1e-4)


def test_samples_of_one_prompt_are_those_without_sharing():
    asked = SamplingParams(n=10, seed=5, max_tokens=16, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": np.random.default_rng(1).integers(2, VOCAB, 30)}
    expected = make_llm(**SETTINGS).generate(prompt, asked)[0]
    llm = make_sharing_llm()
    shared_tables = watch(llm)
    [output] = llm.generate(prompt, asked)
    assert [o.token_ids for o in output.outputs] == [o.token_ids for o in expected.outputs]
    assert any((starts < FAR).any(axis=-1).sum() == 2 for starts in shared_tables), "both groups share"


def brute_force_runs(tables, num_blocks, order, group_rows, first, min_saved):
    runs = []
    for start in range(0, len(order), group_rows):
        rows = order[start : start + group_rows]
        longest = 0
        while first + longest < min(num_blocks[rows]) - 1 and len({tables[r, first + longest] for r in rows}) == 1:
            longest += 1
        runs.append(longest if longest and longest * (len(rows) - 1) >= max(min_saved, 1) else 0)
    return runs


@pytest.mark.parametrize("seed", range(40))
def test_shared_runs_and_what_is_left_make_up_the_tables(seed):
    rng = np.random.default_rng(seed)
    rows, width, first = int(rng.integers(1, 30)), int(rng.integers(1, 20)), int(rng.integers(0, 3))
    num_blocks = rng.integers(1, width + 1, (2, rows))  # of two groups of layers
    tables = rng.integers(0, 1000, (2, rows, width)).astype(np.int32)
    for row in range(rows):  # some begin as one of three texts do
        if (text := int(rng.integers(0, 4))) < 3:
            length = int(rng.integers(0, width + 1))
            tables[:, row, :length] = 2000 + 100 * text + np.arange(length)
    starts = np.where(np.arange(width) < num_blocks[..., None], 16 * np.arange(width), FAR).astype(np.int32)
    min_saved = int(rng.integers(0, 6))
    found = find_shared_runs(tables, num_blocks, SHARED_ROWS, first=first, min_saved=min_saved)
    assert sorted(found.order.tolist()) == list(range(rows))
    for of in range(2):
        expected = brute_force_runs(tables[of], num_blocks[of], found.order, SHARED_ROWS, first, min_saved)
        assert found.runs[of].tolist() == expected

        shared, shared_starts, own, own_starts = split_tables(
            tables[of, found.order], starts[of, found.order], found.runs[of], SHARED_ROWS, first, width
        )
        for place, row in enumerate(found.order):
            group, count = place // SHARED_ROWS, num_blocks[of, row]
            table = np.concatenate([own[place], shared[group]])
            begins = np.concatenate([own_starts[place], shared_starts[group]])
            there = np.argsort(begins)[: np.count_nonzero(begins < FAR)]
            assert begins[there].tolist() == starts[of, row, :count].tolist()
            assert table[there].tolist() == tables[of, row, :count].tolist()


def test_rows_of_one_text_come_together_however_they_are_mixed():
    tables = np.array([[7, 1, 50 + i] if i % 2 else [9, 2, 50 + i] for i in range(16)], np.int32)
    found = find_shared_runs(tables[None], np.full((1, 16), 3), 8, first=0, min_saved=1)
    assert found.runs.tolist() == [[2, 2]]
