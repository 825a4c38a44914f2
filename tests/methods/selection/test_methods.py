"""Methods in the engine against their float64 definitions, with every implementation of attention; ragged, chunked,
preempted, with shared and cached blocks."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.kv.reading import read_bytes
from ksana_jax.kv.selection import read_selection
from ksana_jax.methods.presets import read_patterns
from ksana_jax.methods.selection.quest import Quest
from ksana_jax.methods.selection.rocketkv import RocketKV
from tests import machine
from tests.engine import small
from tests.engine.small import VOCAB, assert_idle, model
from tests.methods.selection import definition
from tests.methods.selection.definition import blocks_read, keys_read
from tests.reference import reference_logprobs

SIZE, BUDGET = 4, 16
RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(2, VOCAB, length).tolist() for length in (43, 14, 30)]
# Of eight dimensions RocketKV scores four.
SCORES = {"quest": definition.quest, "rocketkv": functools.partial(definition.rocketkv, top_r=4)}
NEAR = {"window": 9, "num_sinks": 2}
MIXED = [NEAR, "full"]
GOLDEN = Path(__file__).parents[2] / "golden/rocketkv.json"
IMPLEMENTATIONS = ["xla", pytest.param("native", marks=machine.compiled)]


def make_llm(attention="xla", budget=BUDGET, prompts="whole", method="quest", **settings) -> LLM:
    given = {"block_size": SIZE, "num_blocks": 64, "query_tile": 8, "operators": {"attention": attention}}
    selection = {"method": method, "budget": budget, "full_layers": 1, "prompts": prompts}
    return small.make_llm(**given | {"kv_selection": None if budget is None else selection} | settings)


def outputs_of(llm: LLM, prompts=PROMPTS, **given):
    asked = {"temperature": 0, "max_tokens": 18, "ignore_eos": True, "detokenize": False, "logprobs": 0}
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(**asked | given))
    assert_idle(llm)
    return found


def tokens_of(llm: LLM, prompts=PROMPTS, **given):
    return [output.token_ids for answer in outputs_of(llm, prompts, **given) for output in answer.outputs]


@functools.cache
def expected(method="quest", mixed=False) -> list[list[int]]:
    return tokens_of(make_llm(method=method, pattern=MIXED if mixed else None))


@pytest.mark.parametrize("made", [Quest(), RocketKV(top_r=4)], ids=lambda made: type(made).__name__.lower())
def test_summaries_and_scores_are_those_of_the_definition(made):
    q, keys = RNG.normal(size=(2, 1, 2, 3, 8)), RNG.normal(size=(10, 2, SIZE, 8))
    used = np.arange(SIZE) < RNG.integers(1, SIZE + 1, (10, 1))
    keys[~np.broadcast_to(used[:, None], keys.shape[:3])] = np.nan
    summaries = made.summarise(keys, used, np)
    assert summaries.shape[2:] == made.summary_shape(8)
    summaries[9] = np.nan  # of a block that is absent
    visible = np.arange(10) < np.array([9, 4])[:, None, None, None]
    scores = made.scores(q, np.stack([summaries.transpose(1, 0, 2, 3)] * 2), visible, np)
    for s, head in np.ndindex(2, 2):
        count = visible[s].sum()
        blocks = [keys[block, head, used[block]] for block in range(count)]
        wanted = SCORES[type(made).__name__.lower()](q[s, 0, head], blocks)
        np.testing.assert_allclose(scores[s, 0, head, :count], wanted, rtol=1e-12)


def test_rocketkv_weighs_blocks_as_its_authors_do():
    """Where all blocks are full, a block's weight is that of its tokens together."""
    for case in json.loads(GOLDEN.read_text()):
        rng = np.random.RandomState(case["seed"])
        q, k = rng.uniform(-3, 3, (2, 3, 8)), rng.uniform(-3, 3, (6, 2, SIZE, 8))
        method = RocketKV(top_r=case["top_r"])
        summaries = method.summarise(k, np.ones((6, SIZE), bool), np).transpose(1, 0, 2, 3)
        scores = method.scores((q / np.sqrt(8))[None, None], summaries[None], np.ones((1, 1, 1, 6), bool), np)
        np.testing.assert_allclose(scores[0, 0], np.array(case["weights"]), rtol=1e-6)


@pytest.mark.parametrize(
    ("method", "prompts", "pattern"),
    [
        ("quest", "whole", "full"),
        pytest.param("quest", "streamed", "full", marks=pytest.mark.soak),
        ("rocketkv", "streamed", "full"),
        ("quest", "whole", MIXED),
        pytest.param(
            "quest", "streamed", [NEAR | {"stride": 2, "sink_position": "absolute"}, "full"], marks=pytest.mark.soak
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_log_probabilities_are_those_of_full_attention_to_the_blocks_that_the_definition_selects(
    attention, method, prompts, pattern
):
    """Layers with other patterns read all that these show."""
    config, params = model()
    llm = make_llm(attention, prompts=prompts, method=method, pattern=pattern)
    answers, patterns = outputs_of(llm, prompt_logprobs=0), read_patterns(pattern, config)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        whole = np.array([*prompt, *answer.outputs[0].token_ids])
        first, read = len(prompt) if prompts == "whole" else 0, []

        def selects(layer, q, k, first=first, read=read):
            found = keys_read(SCORES[method], q, k, SIZE, BUDGET, first if layer >= 1 else len(q))
            read.append(found.sum())
            return found

        wanted = reference_logprobs(params, config, whole, patterns, selects=selects)
        assert read[1] < read[0]
        entries = [*(answer.prompt_logprobs or []), *(answer.outputs[0].logprobs or [])]
        got = [entry[int(whole[t])].logprob for t, entry in enumerate(entries) if entry]
        # float32 against float64 through two layers: about 1e-5; 1e-4 is the contract.
        np.testing.assert_allclose(got, [wanted[t - 1, whole[t]] for t in range(1, len(whole))], atol=1e-4)
        assert answer.outputs[0].token_ids == wanted[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("method", "budget", "first"),
    [pytest.param("quest", 64, 0, marks=pytest.mark.soak), ("quest", 48, 1), ("rocketkv", 48, 1)],
)
@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_a_budget_of_the_whole_text_gives_the_bits_of_no_selection(attention, method, budget, first):
    """With 48 tokens, tables are wider than the budget, and all but the first row select all of their blocks."""

    def bits(llm):
        outputs = [output for answer in outputs_of(llm)[first:] for output in answer.outputs]
        return [(t, entry[t].logprob) for o in outputs for t, entry in zip(o.token_ids, o.logprobs, strict=True)]

    assert bits(make_llm(attention, budget, method=method)) == bits(make_llm(attention, None))


@pytest.mark.parametrize(
    "settings",
    [
        # Chunks end in single tokens, which read all of a prompt.
        {"max_num_batched_tokens": 5, "query_tile": 1},
        pytest.param({"max_num_batched_tokens": 48, "query_tile": 16}, marks=pytest.mark.soak),
        pytest.param({"max_num_seqs": 1}, marks=pytest.mark.soak),
        {"num_blocks": 18, "preempt": "recompute"},
        {"num_blocks": 18, "preempt": "swap", "host_cache_bytes": 1 << 18},
        {"enable_prefix_caching": True},
        {"num_scheduler_steps": 4},
        pytest.param({"async_scheduling": False}, marks=pytest.mark.soak),
        {"method": "rocketkv", "max_num_batched_tokens": 5, "query_tile": 1},
        pytest.param({"pattern": MIXED, "max_num_batched_tokens": 5, "query_tile": 1}, marks=pytest.mark.soak),
        {"pattern": MIXED, "num_blocks": 30, "preempt": "swap", "host_cache_bytes": 1 << 18},
        {"pattern": MIXED, "enable_prefix_caching": True},
        {"speculative_config": {"method": "trie", "num_speculative_tokens": 4}},
        pytest.param({"method": "rocketkv", "num_blocks": 18, "preempt": "recompute"}, marks=pytest.mark.soak),
    ],
    ids=repr,
)
def test_tokens_are_the_same_however_they_are_served(settings):
    llm = make_llm(**settings)
    for _ in range(2 if "enable_prefix_caching" in settings else 1):
        assert tokens_of(llm) == expected(settings.get("method", "quest"), "pattern" in settings)


def test_cached_blocks_bring_their_summaries():
    """Prefixes return from the device and, once the pool has replaced them, from the host."""
    llm = make_llm(enable_prefix_caching=True, num_blocks=18, host_cache_bytes=1 << 18)
    plain = make_llm()
    longer = [prompt + [7, 9, 3] for prompt in PROMPTS]
    assert [tokens_of(llm, [p])[0] for p in PROMPTS] == expected()
    assert [tokens_of(llm, [p])[0] for p in longer] == tokens_of(plain, longer)


def test_blocks_from_disk_bring_their_summaries(tmp_path):
    settings = {"enable_prefix_caching": True, "host_cache_bytes": 1 << 18, "disk_cache_dir": str(tmp_path)}
    longer = [prompt + [7, 9, 3] for prompt in PROMPTS]
    with make_llm(**settings) as llm:
        tokens_of(llm)
    with make_llm(**settings) as llm:
        found = outputs_of(llm, longer)
    assert [answer.num_cached_tokens for answer in found] == [40, 12, 28]
    assert [output.token_ids for answer in found for output in answer.outputs] == tokens_of(make_llm(), longer)


def test_completions_of_one_prompt_copy_its_last_block_with_its_summary():
    asked = {"n": 3, "temperature": 0.9, "seed": 5, "logprobs": None}
    found = tokens_of(make_llm(), PROMPTS[:1], **asked)
    assert len({tuple(tokens) for tokens in found}) == 3
    assert found == tokens_of(make_llm(max_num_seqs=1), PROMPTS[:1], **asked)


def test_a_query_reads_the_selected_blocks_and_all_summaries():
    layout, size = make_llm().engine.scheduler.layout, SIZE * 2 * 2 * 8 * 4  # keys and values of two heads, float32
    summaries = 2 * 2 * 8 * 4
    assert layout.block_bytes == 2 * (size + summaries)
    assert read_bytes(layout, 4 * SIZE, 4) == 4 * 2 * size
    assert read_bytes(layout, 10 * SIZE, 10) == 10 * size + 4 * size + 10 * summaries


def test_a_layer_with_a_window_reads_its_blocks_and_no_summaries():
    layout, size = make_llm(pattern=MIXED).engine.scheduler.layout, SIZE * 2 * 2 * 8 * 4
    assert [method is not None for method in layout.selects_in] == [False, True]
    # Of 40 tokens the window holds those from 32 on, and sinks are in the first block.
    assert read_bytes(layout, 10 * SIZE, 13) == 3 * size + 4 * size + 10 * 2 * 2 * 8 * 4


@pytest.mark.soak
@machine.compiled
def test_codes_are_summarised_as_they_are_stored():
    tokens = [tokens_of(make_llm(name, kv_cache_dtype="int8")) for name in ("xla", "native")]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"method": "quest", "budget": 7}, "a budget of 7 tokens is too small: the first and the newest block of 4"),
        ({"method": "quest", "budget": 0}, "kv_selection Quest: budget is 0, must be"),
        ({"method": "quest", "budget": 0.5}, "kv_selection Quest: budget is 0.5, must be"),
        ({"method": "quest", "full_layers": 2}, "full_layers is 2, the model has 2 layers: none would select"),
        ({"method": "quest", "prompts": "once"}, "kv_selection Quest: prompts is 'once', must be"),
        ({"method": "guest"}, "kv_selection method is 'guest', must be one of quest, rocketkv"),
        ({"method": "quest", "budgets": 8}, "kv_selection 'quest' has no setting 'budgets'; the nearest is 'budget'"),
        ({"method": "rocketkv", "top_r": 0}, "kv_selection RocketKV: top_r is 0, must be an integer from 1"),
        ({"method": "rocketkv", "top_r": 1.5}, "kv_selection RocketKV: top_r is 1.5, must be a number above 0 and"),
        ("quest", "kv_selection is 'quest', must be None or a dict such as"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(setting, said):
    with pytest.raises(ConfigError) as caught:
        make_llm(kv_selection=setting)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("pattern", ["sliding_window", ["full", NEAR]], ids=str)
def test_a_layer_must_be_left_that_selects(pattern):
    """The first layer reads all, `full_layers` says."""
    with pytest.raises(ConfigError, match="kv_selection does not go with patterns without a layer of full attention"):
        make_llm(pattern=pattern)


def test_the_pattern_of_an_engine_that_selects_stays_full():
    with pytest.raises(ConfigError, match="kv_selection selects in layers with full attention: their pattern cannot"):
        make_llm().set_pattern({"window": 8})


def test_the_definition_keeps_the_first_and_the_newest_block():
    k = np.zeros((24, 2))
    k[9] = 5, 0
    assert blocks_read(definition.quest, np.array([[1.0, 0.0]]), k, 21, 4, 12) == {0, 2, 5}
    assert read_selection(None) is None
