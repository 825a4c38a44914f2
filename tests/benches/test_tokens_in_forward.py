"""The knee, operations and cost, and that the rows of a step start together."""

import pytest

from experiments.benches.tokens_in_forward import STEPS, TokensInForward, fit, flop_per_token
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.bench.core import Case, Unavailable
from ksana_jax.lab.runs.tasks.results import ResultRow
from tests.engine import small


def test_the_knee_is_where_half_of_the_largest_speed_is_reached():
    line = fit([(n, 0.004 + n / 5000) for n in (1, 2, 4, 8, 16, 64)])
    assert line is not None
    assert (line.fixed_s, line.most, line.knee) == pytest.approx((0.004, 5000, 20))
    assert line.knee / (line.fixed_s + line.knee / line.most) == pytest.approx(line.most / 2)
    assert fit([(1, 0.004)]) is None and fit([(1, 0.004), (2, 0.001)]) is None


def test_operations_are_those_of_the_products():
    model = ModelConfig(
        vocab_size=100, d_model=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16, tie_embeddings=False
    )
    # q and o [8, 8], k and v [8, 4], three MLP matrices [8, 16], two norms of 8; the head [8, 100] and a last norm.
    weights = 2 * (2 * 64 + 2 * 32 + 3 * 128 + 2 * 8) + 800 + 8
    assert flop_per_token(model, 10) == 2 * weights + 2 * 2 * (2 * 4 * 10) * 2


def test_all_rows_of_a_step_start_together_from_cached_prompts():
    bench = TokensInForward(tokens=(1, 3), context=16, price=7.2, models={"tiny": "any"})
    llm = small.make_llm(block_size=16, num_blocks=16, enable_prefix_caching=True)
    bench.llms = {"tiny": llm}
    bench._serve(llm, 3, max_tokens=1)
    found = bench.measure(Case("tiny", {"tokens": 3}))
    assert [record.num_decodes for record in llm.records] == [3] * (STEPS + 1)
    assert found["tokens_per_s"] == pytest.approx(3 / found["step_s"])
    assert found["cost"] == pytest.approx(1e6 / found["tokens_per_s"] * 0.002)
    assert found["flop_per_s"] == pytest.approx(found["tokens_per_s"] * flop_per_token(llm.model_config, 16))


def test_prompts_that_are_not_cached_are_not_measured():
    bench = TokensInForward(tokens=(2,), context=16, models={"tiny": "any"})
    bench.llms = {"tiny": small.make_llm(block_size=16, num_blocks=16, enable_prefix_caching=True)}
    with pytest.raises(Unavailable, match="2 rows of 16 tokens do not fit the pool of 16 blocks"):
        bench.measure(Case("tiny", {"tokens": 2}))


def test_the_conclusion_has_the_knee_of_each_model():
    rows = [
        ResultRow(name, {"tokens": n}, 1, [[]], {"step_s": [fixed + n / 1000]})
        for name, fixed in (("MHA", 0.01), ("MQA", 0.02))
        for n in (1, 4, 16)
    ]
    said = TokensInForward().conclusion(rows)
    assert "MHA 10 tokens (largest speed 1,000 tokens/s" in said and "MQA 20 tokens" in said
    assert TokensInForward().conclusion([]) == ""


def test_a_context_has_whole_blocks():
    with pytest.raises(ConfigError, match="context is 100, must be a multiple of 16"):
        TokensInForward(context=100).cases()
