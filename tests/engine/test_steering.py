"""Steered requests, next to others: against the float64 model, against weights that do the same, and transformers."""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams, Steering
from ksana_jax.core.request import RequestInput
from ksana_jax.engine.activations import activations
from ksana_jax.lab.trace.requests import plain_input, read_input
from ksana_jax.models.params import init_params
from tests.engine.small import SMALL, assert_idle, make_llm, model
from tests.engine.test_forced_tokens import ENGINES, FORCED, PROMPTS
from tests.golden.cases import golden_case
from tests.reference import reference_logprobs

RNG = np.random.default_rng(9)
VECTORS = RNG.normal(size=(3, 32)).astype(np.float32)
BOTH = Steering({0: VECTORS[0], 1: VECTORS[1]}, {0: [3, 1]})
LAST, HEAD = Steering({1: VECTORS[2].tolist()}), Steering(heads_off={1: np.array([2])})
# Prompts and what steers them; without preemption all run together.
BATCH = [(0, BOTH), (1, None), (2, LAST), (0, None), (1, HEAD)]
SOME = {
    "host embedding": {"embedding_device": "host"},
    "chunks": {"max_num_batched_tokens": 5, "query_tile": 4},
    "patterns of heads": {"pattern": {"window": 6, "full_heads": [[1], [0]]}},
}


@functools.cache
def expected(which: int, steering: Steering | None, pattern=None) -> np.ndarray:
    """Log-probabilities [tokens, V] of a continuation."""
    changes = None if steering is None else (steering.vectors, steering.heads_off)
    config, params = model()
    found = reference_logprobs(params, config, PROMPTS[which] + FORCED[which], pattern, steering=changes)
    return found[len(PROMPTS[which]) - 1 : -1]


def serve(llm: LLM, batch, **given):
    """Returns the output of each request, whose continuations are given."""
    given = {"max_tokens": None, "logprobs": -1, "detokenize": False} | given
    asked = [SamplingParams(forced_token_ids=FORCED[which], steering=steering, **given) for which, steering in batch]
    found = llm.generate([{"prompt_token_ids": PROMPTS[which]} for which, _ in batch], asked)
    assert_idle(llm)
    return found


def scores(outputs) -> list[np.ndarray]:
    return [output.outputs[0].distributions for output in outputs]


@pytest.mark.parametrize("name", [*ENGINES, *SOME])
def test_log_probabilities_are_those_of_the_steered_model(name, drafters):
    settings = dict((ENGINES | SOME)[name])
    if settings.get("speculative_config", {}).get("method") in ("draft_model", "bild"):
        settings["speculative_config"] = settings["speculative_config"] | {"model": drafters["near"]}
    llm = make_llm(**settings)
    patterns, moved = tuple(llm.patterns), [(which, BATCH[n - 1][1]) for n, (which, _) in enumerate(BATCH)]
    for batch in (BATCH, moved, BATCH):  # the last time with what is cached
        outputs = serve(llm, batch)
        for (which, steering), found in zip(batch, scores(outputs), strict=True):
            # float32 against float64 through two layers: about 1e-5; 1e-4 is the contract.
            np.testing.assert_allclose(found, expected(which, steering, patterns), atol=1e-4)
    scheduler = llm.engine.scheduler
    assert scheduler.num_preemptions or name not in ("recomputed", "swapped")
    assert outputs[0].num_cached_tokens or name != "prefix cache"
    drafted = [output.metrics.num_draft_tokens for output in outputs]
    assert scheduler.speculation is None or (drafted[0] if "model" in settings["speculative_config"] else any(drafted))


@pytest.mark.parametrize("name", ["four steps a call", "prefix cache", "n-grams", "trees", "swapped"])
def test_rows_that_are_not_steered_have_the_bits_of_a_batch_without(name):
    plain, mixed = (
        scores(serve(make_llm(**ENGINES[name]), [(which, steering and given) for which, given in BATCH]))
        for steering in (None, True)
    )
    for (_, steering), one, other in zip(BATCH, plain, mixed, strict=True):
        assert np.array_equal(one, other) == (steering is None)


def test_prefixes_are_shared_among_equal_steerings_alone():
    llm = make_llm(enable_prefix_caching=True, block_size=4, num_blocks=64, prefix_report_blocks=64)
    same = Steering({1: VECTORS[2]})
    for steering, cached in ((LAST, 0), (None, 0), (HEAD, 0), (same, 16), (None, 16), (BOTH, 0)):
        [output] = serve(llm, [(1, steering)])
        assert output.num_cached_tokens == cached
        np.testing.assert_allclose(*scores([output]), expected(1, steering), atol=1e-4)
        report = output.metrics.prefix_report
        assert report.cause == ("partial_block" if cached else "steering" if steering is not LAST else "never_seen")
    assert "are cached for another steering" in str(report)


def test_another_steering_compiles_nothing():
    llm = make_llm(programs={})
    serve(llm, [(0, None), (1, None)])
    without = llm.runner.num_compilations
    serve(llm, [(0, BOTH), (1, None)])
    steered = llm.runner.num_compilations
    serve(llm, [(0, HEAD), (1, LAST), (2, None)])
    serve(llm, [(0, None), (1, None)])
    assert without < steered == llm.runner.num_compilations


def test_a_step_may_have_many_steerings():
    many = [(0, Steering({0: np.full(32, x)})) for x in range(1, 7)]
    for (which, steering), found in zip(many, scores(serve(make_llm(max_num_seqs=8), many)), strict=True):
        np.testing.assert_allclose(found, expected(which, steering), atol=1e-4)


@functools.cache
def with_biases():
    """The model whose weights do what BOTH does."""
    config, params = model()
    layers = []
    config = dataclasses.replace(config, mlp_bias=True)
    for n, (p, other) in enumerate(zip(params.layers, init_params(config, seed=3).layers, strict=True)):
        off = np.repeat(np.isin(np.arange(4), BOTH.heads_off.get(n, ())), 8)
        given = {"b_gate": other.b_gate * 0, "b_up": other.b_up * 0, "b_down": jnp.array(BOTH.vectors[n])}
        layers.append(p.replace(w_o=jnp.where(off, 0, p.w_o), **given))
    return config, params.replace(layers=tuple(layers))


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_eviction": {"method": "h2o", "budget": 12, "prompts": "streamed"}, "kept_tokens": True},
        pytest.param({"kv_eviction": {"method": "snapkv", "budget": 12, "recent": 3}}, marks=pytest.mark.soak),
        pytest.param({"kv_selection": {"method": "quest", "budget": 8, "full_layers": 1}}, marks=pytest.mark.soak),
        {"kv_cache_dtype": "int8", "enable_prefix_caching": True},
        pytest.param({"kv_cache_dtype": "kivi4"}, marks=pytest.mark.soak),
        {"numerics": "invariant", "block_size": 16},
        pytest.param({"shared_prefix_attention": True, "enable_prefix_caching": True}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_steering_is_what_weights_could_do(settings):
    settings = SMALL | {"block_size": 4, "num_blocks": 64} | settings
    config, params = with_biases()
    batch = [(0, BOTH), (1, BOTH), (2, None)]
    found = serve(make_llm(**settings), batch)
    other = serve(LLM.from_params(config, params, **settings), [(0, None), (1, None)])
    for one, two in zip(found, other, strict=False):
        np.testing.assert_allclose(*scores([one, two]), atol=1e-4)
        if "kept_tokens" in settings:
            np.testing.assert_array_equal(one.outputs[0].kept_tokens, two.outputs[0].kept_tokens)


def test_beams_and_completions_are_steered():
    config, params = with_biases()
    for given in ({"beam_width": 3, "temperature": 0}, {"n": 2, "seed": 5}, {"n": 2, "temperature": 0}):
        asked = SamplingParams(max_tokens=8, detokenize=False, **given)
        prompt = {"prompt_token_ids": PROMPTS[1]}
        [found] = make_llm(num_blocks=32).generate(prompt, dataclasses.replace(asked, steering=BOTH))
        [other] = LLM.from_params(config, params, **SMALL | {"num_blocks": 32}).generate(prompt, asked)
        assert [c.token_ids for c in found.outputs] == [c.token_ids for c in other.outputs]


WRONG = [
    (lambda: Steering(), "steering changes nothing: give vectors or heads_off"),
    (lambda: Steering([1.0]), r"steering: vectors is \[1.0\], must be a dict with layers as keys"),
    (lambda: Steering({-1: [1.0]}), "steering: a layer of vectors is -1, must be an integer from 0"),
    (lambda: Steering({0: [[1.0]]}), r"steering: vectors\[0\] has the shape \[1, 1\], must be a vector"),
    (lambda: Steering({0: "a"}), r"steering: vectors\[0\] is 'a', must be a vector of numbers"),
    (lambda: Steering({0: [1.0, np.nan, 1e39]}), "has 2 of 3 numbers that are not finite in float32"),
    (lambda: Steering(heads_off={0: 3}), r"steering: heads_off\[0\] is 3, must be a list of heads"),
    (lambda: Steering(heads_off={0: [1.5]}), r"a head of steering: heads_off\[0\] is 1.5, must be an integer from 0"),
    (lambda: Steering({0: [1.0]}), r"steering: vectors\[0\] has 1 numbers, hidden states have 32"),
    (lambda: Steering({2: VECTORS[0]}), "steering: a layer of vectors is 2, must be an integer from 0 to 1"),
    (lambda: Steering(heads_off={1: [0, 4]}), r"a head of heads_off\[1\] is 4, must be an integer from 0 to 3"),
    (lambda: {"vectors": {0: VECTORS[0]}}, "steering is of type dict, must be a ksana_jax.Steering"),
]


@pytest.mark.parametrize(("steering", "message"), WRONG)
def test_what_cannot_be_steered_is_refused(steering, message):
    with pytest.raises(ValueError, match=message):
        make_llm().generate({"prompt_token_ids": [5]}, SamplingParams(steering=steering(), detokenize=False))


def test_steering_is_replayed():
    llm = make_llm()
    asked = SamplingParams(steering=BOTH, detokenize=False)
    request = llm.engine.new_request(np.array([5, 6]), asked)
    recorded = plain_input(request, RequestInput(request.prompt_token_ids, asked))
    given = read_input(json.loads(json.dumps(recorded)))
    assert given.params.steering.digest == BOTH.digest != HEAD.digest


@pytest.mark.filterwarnings("default")  # theirs are not ours to mend
@pytest.mark.parametrize("name", ["llama-gqa-tied", "gemma2-gqa-window-tied"])
def test_hidden_states_and_scores_are_those_of_transformers_with_hooks(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    case = golden_case(name)
    tokens, states = case.prompts[-1].tolist(), []
    theirs = transformers.AutoModelForCausalLM.from_pretrained(case.model_dir, dtype=torch.float32)
    config = theirs.config
    width = theirs.base_model.layers[0].self_attn.head_dim
    vectors = {n: RNG.normal(size=config.hidden_size).astype(np.float32) for n in (0, config.num_hidden_layers - 1)}
    steering = Steering(vectors, {0: [0], 1: [config.num_attention_heads - 1]})

    def hook(n, module, given, out):
        x = (out[0] if isinstance(out, tuple) else out) + torch.tensor(vectors.get(n, np.float32(0)))
        states.append(x)
        return (x, *out[1:]) if isinstance(out, tuple) else x

    def without_heads(n, module, given):
        x = given[0].clone()
        for head in steering.heads_off.get(n, ()):
            x[..., head * width : (head + 1) * width] = 0
        return (x,)

    for n, layer in enumerate(theirs.base_model.layers):
        layer.register_forward_hook(functools.partial(hook, n))
        layer.self_attn.o_proj.register_forward_pre_hook(functools.partial(without_heads, n))
    with torch.no_grad():
        logprobs = torch.log_softmax(theirs(torch.tensor([tokens])).logits[0], -1).numpy()
    llm = LLM(str(case.model_dir), max_model_len=80, num_blocks=16, max_num_batched_tokens=32)
    asked = SamplingParams(max_tokens=1, logprobs=-1, detokenize=False, temperature=0, steering=steering)
    found = activations(llm, {"prompt_token_ids": tokens}, asked)
    for mine, other in zip(found.hidden, states, strict=True):
        np.testing.assert_allclose(mine, other.reshape(mine.shape).numpy(), atol=1e-4)
    np.testing.assert_allclose(found.output.outputs[0].distributions[0], logprobs[-1], atol=1e-4)
