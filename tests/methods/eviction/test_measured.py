"""Budgets that methods divide by the data: rounded to intervals, refused, and freed by layer and KV head."""

import functools

import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.eviction.apportioning import measured_budgets
from ksana_jax.kv.eviction.schedule import EvictionSchedule
from ksana_jax.methods.eviction.cake import CAKE
from tests.engine import small
from tests.fake_pool import StoringExecutor
from tests.fakes import asking, make_engine, prompt_of, step
from tests.soak import soak_unless

make_llm = functools.partial(small.make_llm, async_scheduling=False)


class Given(CAKE):
    """Wants what a test gives."""

    wanted = None

    def budgets(self, measured, num_kept, num_prompt):
        return self.wanted


class Uneven(CAKE):
    """Gives the first layer half of the mean."""

    def budgets(self, measured, num_kept, num_prompt):
        return num_kept * np.array([0.5, 1.5])


def budgets_of(wanted, num_prompt=100, **settings):
    method = type("Given", (Given,), {"wanted": wanted})(**{"budget": 40, "recent": 8, **settings})
    shares = (1.0, None, 1.0, 1.0)  # the second group has windows
    return measured_budgets(EvictionSchedule(method, shares, 4), np.zeros((3, 1, 2, 2)), num_prompt)


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        ([40, 40, 40], [40, 40, 40]),
        ([20, 44, 56], [20, 44, 56]),
        ([21, 43, 56], [20, 44, 56]),  # of the remainders 1, 3 and 0 the second is the largest
        ([0, 20, 100], [8, 16, 96]),  # 8 recent tokens stay, and the sum of 120
        ([0, 0, 500], [8, 12, 100]),  # no layer keeps more than the prompt
        ([10, 10, 10], [40, 40, 40]),  # the sum is that of equal budgets
    ],
)
def test_budgets_are_whole_intervals_near_those_wanted(wanted, kept):
    found = budgets_of(wanted)
    assert found[[0, 2, 3]].tolist() == kept and sum(kept) == 120
    assert found[1] > 10**6, "it evicts nothing"


def test_a_budget_that_is_no_number_is_an_error():
    with pytest.raises(ConfigError, match=r"Given: budgets returns \[nan, 1.0, 1.0\], must be finite numbers of shape"):
        budgets_of([np.nan, 1, 1])
    with pytest.raises(ConfigError, match=r"must be finite numbers of shape \(3,\)"):
        budgets_of([1, 2])


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        (
            {"prompts": "streamed"},
            "prompts is 'streamed', must be 'once': budgets are measured when a prompt is complete",
        ),
        ({"memory": "simulated"}, 'memory is "simulated", must be "freed"'),
        ({"layers": "pyramid"}, "layers is 'pyramid', must be 'uniform'"),
        ({"tau1": 0}, "CAKE: tau1 is 0, must be a finite number above 0"),
        ({"method": "adakv", "memory": "freed", "of": {"method": "tova"}}, "TOVA compares KV heads"),
    ],
)
def test_settings_that_leave_nothing_to_measure_are_refused(setting, problem):
    with pytest.raises(ConfigError, match=problem):
        read_eviction({"method": "cake"} | setting)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tensor_parallel_size": 2}, "each device decides about its own KV heads"),
        ({"kv_full_precision_layers": (0,), "kv_cache_dtype": "int8"}, "blocks hold single heads"),
    ],
)
def test_engines_with_heads_apart_refuse_settings_of_whole_layers(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        make_llm(kv_eviction={"method": "adakv", "memory": "freed", "budget": 8}, **settings)


def test_blocks_return_to_the_pool_by_layer():
    """As many as with equal budgets, when the prompt is complete."""
    method, used = "tests.methods.eviction.test_measured:Uneven", []
    setting = {"method": method, "budget": 20, "recent": 4}
    engine = make_engine(stored={"kv_eviction": setting}, make_executor=StoringExecutor, max_num_batched_tokens=64)
    engine.add_request(prompt_of(48), asking(6))
    rows = engine.scheduler.rows
    for _ in range(2):
        step(engine)
        used.append((engine.scheduler.blocks.num_used, rows.num_blocks[:, 0].tolist()))
    # 8 and 32 tokens, and the next one.
    assert used == [(24, [12, 12]), (12, [3, 9])]


@pytest.mark.parametrize("layerwise", soak_unless(lambda x: x, [True, False]))
def test_heads_that_free_their_memory_keep_the_tokens_of_simulated_memory(layerwise):
    """In blocks of one token, so that nothing is rounded."""
    prompts = [{"prompt_token_ids": np.random.default_rng(n).integers(2, small.VOCAB, n).tolist()} for n in (30, 21)]
    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=0)
    found, blocks = {}, {}
    for memory in ("simulated", "freed"):
        setting = {
            "method": "adakv",
            "budget": 12,
            "recent": 3,
            "interval": 1,
            "layerwise": layerwise,
            "memory": memory,
        }
        llm = make_llm(kv_eviction=setting, block_size=1, num_blocks=512, max_num_batched_tokens=16, kept_tokens=True)
        outputs = [output.outputs[0] for output in llm.generate(prompts, asked)]
        found[memory] = [(o.token_ids, o.kept_tokens, o.cumulative_logprob) for o in outputs]
        blocks[memory] = [record.live_blocks for record in llm.records]
    for (ids, kept, logprob), (same_ids, same_kept, same_logprob) in zip(
        found["freed"], found["simulated"], strict=True
    ):
        assert ids == same_ids and (kept == same_kept).all()
        assert len({*kept[:, :, :-6].sum(axis=2).ravel().tolist()}) > 1, "heads keep different numbers"
        # float32 with keys in another order.
        assert logprob == pytest.approx(same_logprob, abs=1e-4)
    assert blocks["freed"][-1] < max(blocks["freed"]) / 2
