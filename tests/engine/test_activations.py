"""Attention weights and hidden states of requests: the float64 model's and, where torch is installed, transformers'."""

import functools

import numpy as np
import pytest
from safetensors.numpy import load_file

from ksana_jax import LLM, AttentionPattern, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.engine.activations import activations
from tests.engine import small, test_block_codecs, test_kv_codecs
from tests.engine.small import VOCAB, assert_idle, model
from tests.golden.cases import golden_case
from tests.guessing import ANSWERS
from tests.methods.eviction.defined import METHODS
from tests.methods.eviction.reference import run
from tests.methods.selection.definition import keys_read, quest
from tests.reference import reference_logprobs

make_llm = functools.partial(
    small.make_llm, block_size=4, num_blocks=64, max_num_batched_tokens=16, query_tile=8, num_scheduler_steps=2
)
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, prompt_logprobs=0, logprobs=0)
PROMPT = (2 + np.random.default_rng(5).permutation(VOCAB - 2)[:30]).tolist()
# float32 against float64 through two layers: about 1e-5; 1e-4 is the contract.
ATOL = 1e-4


def text_of(found) -> np.ndarray:
    return np.array(found.output.prompt_token_ids + found.output.outputs[0].token_ids)


def expect(found, **reference) -> None:
    """Weights and last hidden states are the float64 model's, whose scores are the request's."""
    (config, params), tokens, weights = model(), text_of(found)[:-1], []
    logprobs = reference_logprobs(params, config, tokens, attention=weights, **reference)
    weights = np.array(weights).reshape(2, 4, len(tokens), len(tokens))
    assert found.attention.shape == weights.shape and found.hidden.shape == (2, len(tokens), 32)
    np.testing.assert_allclose(found.attention, weights, atol=ATOL)
    expect_scores(found)
    got = np.array([entry[int(token)].logprob for entry, token in zip(scores(found), text_of(found)[1:], strict=True)])
    np.testing.assert_allclose(got, logprobs[np.arange(len(tokens)), text_of(found)[1:]], atol=ATOL)


def scores(found) -> list:
    return [*found.output.prompt_logprobs[1:], *found.output.outputs[0].logprobs]


def expect_scores(found) -> None:
    """The last hidden states give the log-probabilities that the engine has returned."""
    config, params = model()
    x, text = np.asarray(found.hidden[-1], np.float64), text_of(found)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * np.asarray(params.final_norm, np.float64)
    z = x @ np.asarray(params.embed if params.head is None else params.head, np.float64).T
    z -= np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) + z.max(-1, keepdims=True)
    got = [entry[int(token)].logprob for entry, token in zip(scores(found), text[1:], strict=True)]
    np.testing.assert_allclose(got, z[np.arange(len(z)), text[1:]], atol=ATOL)


@pytest.mark.parametrize(
    "pattern",
    [
        None,
        AttentionPattern(window=9, num_sinks=2),
        AttentionPattern(window=9, num_sinks=2, sink_position="ceiling"),
        [AttentionPattern(window=7, stride=2), AttentionPattern(window=6, global_every=8)],
    ],
    ids=str,
)
def test_weights_are_the_float64_models_under_patterns(pattern):
    llm = make_llm(pattern=pattern, max_repositioned_sinks=2)
    found = activations(llm, {"prompt_token_ids": PROMPT}, PARAMS)
    expect(found, pattern=pattern)
    assert_idle(llm)


def test_heads_of_a_layer_may_have_patterns_of_their_own():
    window, full = AttentionPattern(window=6), AttentionPattern()
    llm = make_llm(pattern={"window": 6, "full_heads": [[1], [0]]})
    found = activations(llm, {"prompt_token_ids": PROMPT}, PARAMS)
    expect(found, pattern=[window, full, full, window])
    some = activations(llm, {"prompt_token_ids": PROMPT}, PARAMS, heads=[3, 0])
    np.testing.assert_array_equal(some.attention, found.attention[:, [3, 0]])


@pytest.mark.parametrize("name", ["int8", "hadamard4"])
def test_keys_are_read_as_a_codec_stores_them(name):
    text, _ = test_kv_codecs.text_without_ties(name)
    llm = make_llm(kv_cache_dtype=name)
    found = activations(llm, {"prompt_token_ids": text.tolist()}, SamplingParams(max_tokens=1, detokenize=False))
    weights = []
    reference_logprobs(*reversed(model()), text, attention=weights, stored=test_kv_codecs.Definition(name))
    np.testing.assert_allclose(found.attention, np.array(weights).reshape(2, 4, 10, 10), atol=ATOL)


def test_keys_of_blocks_are_read_as_codes_or_exactly():
    setting = test_block_codecs.KVQUANT
    text, _ = test_block_codecs.expected_logprobs(setting)
    llm = make_llm(kv_cache_dtype=setting, max_num_batched_tokens=7, query_tile=4)
    found = activations(llm, {"prompt_token_ids": text.tolist()}, SamplingParams(max_tokens=1, detokenize=False))
    weights, stored = [], test_block_codecs.Definition(setting)
    exact = test_block_codecs.read_exactly(setting, len(text))
    reference_logprobs(*reversed(model()), text, attention=weights, stored=stored, exact=exact, unrotated=True)
    np.testing.assert_allclose(found.attention, np.array(weights).reshape(2, 4, 11, 11), atol=ATOL)


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("h2o", "freed"),
        ("h2o", "simulated"),
        ("snapkv", "freed"),
        ("streaming_llm", "freed"),
        ("keydiff, positions in the cache", "freed"),
    ],
)
def test_weights_under_eviction_are_those_of_its_definition(name, memory):
    setting, rule_of = METHODS[name]
    llm = make_llm(kv_eviction=setting | {"memory": memory}, kept_tokens=True)
    found = activations(llm, {"prompt_token_ids": PROMPT}, PARAMS)
    text = text_of(found)[:-1]
    _, _, states = run(*reversed(model()), text, rule_of(len(PROMPT)), len(PROMPT))
    by_head = found.attention.reshape(2, 2, 2, len(text), len(text)).sum(axis=2)
    for layer, heads in enumerate(states):
        for head, state in enumerate(heads):
            expected = np.zeros((len(text), len(text)))
            for query, weights in enumerate(state.weights):
                expected[query, list(weights)] = list(weights.values())
            np.testing.assert_allclose(by_head[layer, head], expected, atol=ATOL)
    expect_scores(found)
    # What the last token attends to is what is kept.
    last = found.attention.reshape(2, 2, 2, len(text), len(text))[..., -1, :].max(axis=2) > 0
    np.testing.assert_array_equal(last, found.output.outputs[0].kept_tokens)
    assert not last.all()


@pytest.mark.parametrize("prompts", ["whole", "streamed"])
def test_weights_and_kept_tokens_under_selection_are_those_of_its_definition(prompts):
    llm = make_llm(
        kv_selection={"method": "quest", "budget": 16, "prompts": prompts, "full_layers": 1}, kept_tokens=True
    )
    found = activations(llm, {"prompt_token_ids": PROMPT}, PARAMS)
    first = len(PROMPT) if prompts == "whole" else 0
    expect(found, selects=lambda layer, q, k: keys_read(quest, q, k, 4, 16, first if layer else len(q)))
    last = found.attention.reshape(2, 2, 2, *found.attention.shape[2:])[..., -1, :].max(axis=2) > 0
    np.testing.assert_array_equal(found.output.outputs[0].kept_tokens, last)
    assert last[0].all() and last[1].sum(-1).max() <= 16


def test_rejected_draft_tokens_leave_no_trace():
    plain = activations(make_llm(), {"prompt_token_ids": PROMPT}, PARAMS)
    ANSWERS[np.array(PROMPT, np.int32).tobytes()] = [plain.output.outputs[0].token_ids]
    guesses = {"guesses": "right at first", "num_speculative_tokens": 3, "vocab_size": VOCAB}
    llm = make_llm(speculative_config={"method": "tests.guessing:Guessing"} | guesses)
    found = activations(llm, {"prompt_token_ids": PROMPT}, PARAMS)
    metrics = found.output.metrics
    assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
    expect(found)


def test_chosen_layers_and_heads_go_to_a_file(tmp_path):
    llm, path = make_llm(), tmp_path / "activations.safetensors"
    whole = activations(llm, {"prompt_token_ids": PROMPT}, PARAMS)
    found = activations(llm, {"prompt_token_ids": PROMPT}, PARAMS, layers=[1], heads=[3, 0], path=path)
    stored = load_file(path)
    np.testing.assert_array_equal(stored["attention"], whole.attention[[1]][:, [3, 0]])
    np.testing.assert_array_equal(stored["hidden"], whole.hidden[[1]])
    np.testing.assert_array_equal(found.attention, stored["attention"])


@pytest.mark.parametrize(
    ("settings", "asked", "said"),
    [
        ({}, {"max_bytes": 20_000}, "2 layers, 4 heads and 30 tokens take 35.6 KiB, max_bytes is 19.5 KiB"),
        ({}, {"layers": [2]}, "layers is 2, must be an integer from 0 to 1"),
        ({"kv_eviction": {"method": "h2o", "budget": 12}}, {}, "need an engine with kept_tokens"),
        ({"shared_prefix_attention": True}, {}, "of single rows on one device, not with shared_prefix_attention"),
    ],
)
def test_what_cannot_be_recorded_is_refused(settings, asked, said):
    llm = make_llm(**settings)
    with pytest.raises((ValueError, ConfigError), match=said):
        activations(llm, {"prompt_token_ids": PROMPT}, **asked)
    assert not llm.engine.inspectors
    assert_idle(llm)


@pytest.mark.filterwarnings("default")  # theirs are not ours to mend
@pytest.mark.parametrize(
    "name", ["llama-gqa-tied", "gemma2-gqa-window-tied", "gpt_oss-gqa-window-rope-yarn-experts-biases"]
)
def test_weights_and_hidden_states_are_those_of_transformers(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    case = golden_case(name)
    tokens = case.prompts[-1].tolist()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        case.model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    states = []
    for layer in theirs.base_model.layers:
        layer.register_forward_hook(lambda module, given, out: states.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        weights = theirs(torch.tensor([tokens]), output_attentions=True).attentions
    llm = LLM(str(case.model_dir), max_model_len=80, num_blocks=16, max_num_batched_tokens=32)
    found = activations(llm, {"prompt_token_ids": tokens})
    np.testing.assert_allclose(found.attention, np.array([w[0].numpy() for w in weights]), atol=ATOL)
    for mine, other in zip(found.hidden, states, strict=True):
        np.testing.assert_allclose(mine, other.reshape(mine.shape).numpy(), atol=ATOL)
