"""`lora:` in a training file: the model's own weights stay, and the adapter is one that engines serve."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments.training import train
from experiments.training.adapted_model import adapted_model
from experiments.training.adapter_export import LowRankPair
from experiments.training.lora import first_adapter, merged
from experiments.training.optimizer import init_state, make_train_step, training_logits
from experiments.training.settings import LoraSettings, load_config
from ksana_jax import LLM, LoRARequest, SamplingParams
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.loading import export_hf, load_model
from ksana_jax.models.dense import dense_logits
from ksana_jax.models.params import init_params
from ksana_jax.tokenizers.load import load_tokenizer
from tests.reference import reference_logprobs

LORA = ["lora.rank=4", "lora.alpha=8", "lora.target_modules=[q_proj,down_proj]", "learning_rate=0.02"]
NAMES = {f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")}


@pytest.fixture(scope="module")
def overrides(finished):
    return [f"init_from={finished}/export", *LORA]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, tiny_config, overrides):
    """out_dir of a run of 20 steps."""
    out = tmp_path_factory.mktemp("adapted")
    train(str(tiny_config), [f"out_dir={out}", *overrides])
    return out


def pairs_of(out):
    found = load_file(out / "export" / "adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in found} == NAMES
    return {name: LowRankPair(*(found[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")) for name in NAMES}


def test_an_adapter_learns_on_a_frozen_model(adapted, finished):
    losses = []
    for out in (finished, adapted):
        records = map(json.loads, (out / "train_log.jsonl").read_text().splitlines())
        losses.append([record["heldout_loss"] for record in records if "heldout_loss" in record])
    assert losses[1][-1] < losses[1][0] < losses[0][-1]
    assert all(np.abs(pair.b).max() > 0 for pair in pairs_of(adapted).values())
    assert {path.name for path in (adapted / "export").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "heldout.txt", "train_log.jsonl",
    }  # fmt: skip


def test_an_engine_serves_a_trained_adapter(adapted, finished, tiny_config, overrides):
    config = load_config(tiny_config, ["out_dir=unused", *overrides])
    model, params = load_model(finished / "export")
    whole = merged(params, pairs_of(adapted), config.lora, model)
    prompt = list(range(40, 60))
    expected = reference_logprobs(whole, model, np.array(prompt))
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(finished / "export"), enable_lora=True, max_lora_rank=4, num_blocks=8, max_model_len=64) as llm:
        request = LoRARequest("trained", 1, str(adapted / "export"))
        [output] = llm.generate(prompt_token_ids=[prompt], sampling_params=asked, lora_request=request)
    found = [output.prompt_logprobs[t][prompt[t]].logprob for t in range(1, len(prompt))]
    np.testing.assert_allclose(found, expected[np.arange(len(prompt) - 1), prompt[1:]], atol=1e-4)
    assert output.outputs[0].token_ids == [expected[-1].argmax()]


def test_a_run_that_was_interrupted_gives_the_same_adapter(adapted, tiny_config, overrides, tmp_path):
    for num_steps in (10, 20):  # the decay of the rate begins after step 16
        train(str(tiny_config), [f"out_dir={tmp_path}", *overrides, f"num_steps={num_steps}", "decay_fraction=0"])
    whole = tmp_path / "whole"
    train(str(tiny_config), [f"out_dir={whole}", *overrides, "decay_fraction=0"])
    for name, pair in pairs_of(whole).items():
        np.testing.assert_array_equal(pair.b, pairs_of(tmp_path)[name].b)
    with pytest.raises(ConfigError, match=r"lora .*rank': 4"):
        train(str(tiny_config), [f"out_dir={tmp_path}", *overrides, "lora.rank=2"])


def test_a_step_has_the_gradients_of_the_two_matrices(finished, tiny_config, overrides):
    """Adam's first step is the learning rate times the gradient's sign: B moves, A, whose gradient is 0, does not."""
    config = load_config(tiny_config, ["out_dir=unused", *overrides, "weight_decay=0", "compute_dtype=f32"])
    model, params = load_model(finished / "export")
    first = first_adapter(config.lora, model, 0)
    before = jax.device_get(first)
    tokens = np.random.default_rng(0).integers(3, 300, (2, 64))
    state, _ = make_train_step(config)(
        init_state(config, first), tokens, np.roll(tokens, -1, 1), np.float32(0.5), params
    )
    for name, (a, b) in state.params.items():
        np.testing.assert_array_equal(a, before[name].a)
        assert np.abs(b).max() == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(
    "override, error",
    [
        ("init_from=null", "lora needs init_from"),
        ("lora.rank=0", "lora.rank is 0"),
        ("lora.alpha=0", "lora.alpha is 0"),
        ("lora.target_modules=[]", "lora.target_modules is empty"),
        ("lora.target_modules=[w_q]", "lora.target_modules has 'w_q', the model's modules are down_proj, gate_proj"),
    ],
)
def test_bad_settings_get_one_sentence(override, error, tiny_config, overrides, tmp_path):
    with pytest.raises(ConfigError, match=error):
        train(str(tiny_config), [f"out_dir={tmp_path}", *overrides, override])


def test_targets_are_ends_of_names(finished):
    model, _ = load_model(finished / "export")
    assert set(first_adapter(LoraSettings(target_modules=["0.mlp.up_proj"]), model, 0)) == {
        "model.layers.0.mlp.up_proj"
    }


# ---------------------------------------------------------------------- other models, with their own tokenizers

SHAPE = {
    "vocab_size": 260,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 48,
}


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """A random Qwen3 with a byte-level tokenizer: no beginning-of-text token, token 258 ends a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("qwen3")
    config = ModelConfig(family="qwen3", qk_norm="head", max_position=128, bos_id=None, eos_ids=(258,), **SHAPE)
    export_hf(folder, config, init_params(config, 3))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(f"<|{index}|>", special=True) for index in range(256, 260)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|258|>"}')
    return folder


def adapter_of(other_model, corpus_dir, tmp_path, *more):
    file = tmp_path / "adapter.yaml"
    file.write_text(
        f"{{init_from: {other_model}, corpus_dir: {corpus_dir}, bos: false, lora: {{rank: 2}}, context: 64, "
        "batch_size: 2, num_steps: 2, budget_s: null, log_every: 1, eval_every: 2, eval_sequences: 2}"
    )
    return str(file), [f"out_dir={tmp_path}/out", *more]


def test_an_adapter_of_another_model_is_trained_on_its_own_tokens(other_model, corpus_dir, tmp_path):
    file, overrides = adapter_of(other_model, corpus_dir, tmp_path)
    train(file, overrides)
    with np.load(tmp_path / "out" / "tokens.npz") as found:
        first = found["held"][: found["held_starts"][1]].tolist()
    name = (tmp_path / "out" / "heldout.txt").read_text().splitlines()[0]
    assert first == [*load_tokenizer(other_model).encode((corpus_dir / name).read_text()), 258]
    assert not (tmp_path / "out" / "tokenizer.model").exists()
    with LLM(str(other_model), enable_lora=True, num_blocks=8, max_model_len=64) as llm:
        request = LoRARequest("other", 1, str(tmp_path / "out" / "export"))
        [output] = llm.generate("import sys", SamplingParams(max_tokens=2), lora_request=request)
        assert len(output.outputs[0].token_ids) > 0


def test_training_computes_the_logits_of_another_family(other_model):
    config, params = load_model(other_model)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 64))
    expected = dense_logits(params, tokens, config=config)
    np.testing.assert_allclose(training_logits(params, tokens, config=config), expected, atol=2e-5)


@pytest.mark.parametrize(
    "override, error",
    [
        ("context=256", "context is 256, .* was trained for 128"),
        ("bos=true", "bos is true, .* has no beginning-of-text token"),
        ("model.d_model=64", "has d_model 32, not 64; init_from: .* has num_layers 2, not 4"),
        ("vocab_size=384", "has vocab_size 260, not 384"),
        ("recall_fraction=0.1", "recall_fraction is 0.1, and examples are written for tokens 1 and 2"),
    ],
)
def test_settings_that_are_not_the_models_get_one_sentence(override, error, other_model, corpus_dir, tmp_path):
    with pytest.raises(ConfigError, match=error):
        train(*adapter_of(other_model, corpus_dir, tmp_path, override))


def test_a_model_with_windows_is_refused(tmp_path):
    config = ModelConfig(family="mistral", pattern=AttentionPattern(window=8), max_position=128, **SHAPE)
    export_hf(tmp_path, config, init_params(config, 0))
    with pytest.raises(ConfigError, match="has windows, with which no adapter is trained here"):
        adapted_model(str(tmp_path))
