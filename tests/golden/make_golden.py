"""Makes the golden files: tiny random models, and what transformers computes with them.

  python tests/golden/make_golden.py [case ...]      (needs `pip install -e .[parity]`; about 10 s on a CPU)

One folder for each case: config.json, model.safetensors, and expected.npz with prompts, log-probabilities of every
prompt position [T, V] in float32, and 16 greedy tokens. Cases are made so that a mistake shows: weights are large
enough that attention decides and no two tokens are nearly tied, and each case is checked to change when its rotary
scaling or its window is taken away. transformers 5.23.0 with torch 2.13.0 made the files that are committed,
5.24.0 those of OLMo 2 and of the families after it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from golden_configs import CASES, without
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mistral4 import Mistral4ForCausalLM
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

HERE = Path(__file__).parent
LENGTHS = (1, 9, 70)
NUM_GREEDY = 16
LEAST_GAP = 0.01  # between the two best tokens, in logits; far above rounding
LEAST_EFFECT = 0.05  # of what a case is about, on some log-probability

STORED = {"llama-mha": torch.float32, "qwen2-gqa-tied": torch.bfloat16}  # the others in float16


def main(names: list[str]) -> None:
    for name in names or CASES:
        make_case(name, HERE / name)


def make_case(name: str, folder: Path) -> None:
    config = CASES[name]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for seed in range(100):
        write_weights(folder, STORED.get(name, torch.float16), np.random.default_rng([zlib.crc32(name.encode()), seed]))
        model = load(folder)
        rng = np.random.default_rng(seed)
        lengths = (*LENGTHS[:-1], 40) if "dynamic" in name else LENGTHS
        prompts = [rng.integers(0, config["vocab_size"], length) for length in lengths]
        runs = [run(model, prompt) for prompt in prompts]
        if min(gap for *_, gap in runs) > LEAST_GAP:
            break
    else:
        raise SystemExit(f"{name}: no seed keeps the two best tokens apart")
    expected = {}
    for index, (prompt, (logprobs, greedy, _)) in enumerate(zip(prompts, runs, strict=True)):
        expected |= {
            f"prompt_{index}": prompt.astype(np.int32),
            f"logprobs_{index}": logprobs,
            f"greedy_{index}": greedy,
        }
    if "dynamic" in name:
        beyond = rng.integers(0, config["vocab_size"], 120)
        expected |= {"beyond": beyond.astype(np.int32), "beyond_logprobs": logprobs_of(load(folder), beyond)}
    np.savez(folder / "expected.npz", **expected)
    effect = effect_of_feature(config, folder, expected)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: seed {seed}, effect {effect:.2f}, {size:,} bytes")
    if effect < LEAST_EFFECT:
        raise SystemExit(f"{name}: what the case is about changes log-probabilities by {effect} only")


def load(folder: Path):
    # Their chunk form differs by 1e-4 from their own step form, which is ours.
    for module in (modeling_olmo_hybrid, modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe):
        module.torch_chunk_gated_delta_rule = module.torch_recurrent_gated_delta_rule
    modeling_kimi_linear.chunk_kimi_delta_attention = modeling_kimi_linear.recurrent_kimi_delta_attention
    # transformers 5.24.0 adds ALiBi twice in Falcon's eager attention.
    attention = "sdpa" if "falcon" in (folder / "config.json").read_text() else "eager"
    # transformers 5.24.0 lists no language model for Mistral 4.
    kind = Mistral4ForCausalLM if "mistral4" in (folder / "config.json").read_text() else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


def from_config(config, **settings):
    is_listed = config.model_type != "mistral4"
    make = AutoModelForCausalLM.from_config if is_listed else Mistral4ForCausalLM._from_config
    return make(config, **settings)


def write_weights(folder: Path, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Random weights under the names that transformers saves them with, rounded to the stored dtype."""
    model = from_config(AutoConfig.from_pretrained(folder))
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        saved = load_file(Path(scratch, "model.safetensors"))
    tensors, plus_one = {}, model.config.model_type.startswith(("gemma", "qwen3_next", "qwen3_5"))
    for name, tensor in sorted(saved.items()):
        if name.endswith("bias"):
            values = 0.3 * rng.standard_normal(tensor.shape)
        elif "norm" in name or ".ln_" in name:
            # The norms of some families have weights that are added to 1, but those of delta rules' results do not.
            values = (not plus_one or "linear_attn" in name) + 0.2 * rng.standard_normal(tensor.shape)
        else:
            std = 0.5 if any(part in name for part in ("embed", "lm_head", "wte", "wpe", "sinks")) else 0.25
            values = std * rng.standard_normal(tensor.shape)
        tensors[name] = torch.tensor(values, dtype=torch.float32).to(dtype)
    if hasattr(model.config, "quantization_config"):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            num_experts, num_in, num_out = tensors.pop(name).shape
            blocks = num_experts, num_out, num_in // 32
            tensors[f"{name}_blocks"] = torch.tensor(rng.integers(0, 256, (*blocks, 16)), dtype=torch.uint8)
            # Numbers of 2.5 on average are multiplied by 2 ** (scale - 127).
            tensors[f"{name}_scales"] = torch.tensor(rng.integers(121, 126, blocks), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def logprobs_of(model, ids: np.ndarray) -> np.ndarray:
    logits = model(torch.tensor(ids)[None], use_cache=False).logits[0].float()
    return torch.log_softmax(logits, -1).numpy()


@torch.no_grad()
def run(model, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Log-probabilities of the prompt, greedy tokens by transformers' own loop, and the least gap on the way."""
    logprobs = logprobs_of(model, prompt)
    out = model.generate(
        torch.tensor(prompt)[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_GREEDY,
        do_sample=False,
        pad_token_id=0,
    )
    text = out[0].numpy()
    assert len(text) == len(prompt) + NUM_GREEDY, "generation ended early"
    whole = logprobs_of(model, text)[len(prompt) - 1 : -1]
    assert (whole.argmax(-1) == text[len(prompt) :]).all(), "with and without a cache differ"
    best = np.sort(whole, -1)
    return logprobs, text[len(prompt) :].astype(np.int32), float((best[:, -1] - best[:, -2]).min())


def effect_of_feature(config: dict, folder: Path, expected: dict) -> float:
    """How far the longest text's log-probabilities move when the rotary scaling or the window is taken away.

    Where a case has neither, it is all tokens but the last two that are taken away: attention must matter.
    """
    plain = dict(config)
    form = config.get("rope_scaling") or config.get("rope_parameters") or {}
    text, logprobs = expected["prompt_2"], expected["logprobs_2"]
    if "dynamic" in folder.name:
        text, logprobs = expected["beyond"], expected["beyond_logprobs"]
    if form.get("rope_type", form.get("type", "default")) != "default":
        plain = without(plain, "rope_scaling", "rope_parameters")
        plain["rope_theta"] = form.get("rope_theta", config.get("rope_theta", 10000.0))
    elif config["model_type"].startswith(("gemma2", "gemma3", "olmo3", "cohere2", "ministral")):
        plain["sliding_window"] = config["max_position_embeddings"]
    elif config["model_type"] in ("mistral", "phi3") and config["sliding_window"]:
        plain["sliding_window"] = None
    elif config.get("use_sliding_window"):
        plain = without(plain, "layer_types") | {"use_sliding_window": False}
    else:
        return float(np.abs(logprobs_of(load(folder), text[-2:])[-1] - logprobs[-1]).max())
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "config.json").write_text(json.dumps(plain))
        Path(scratch, "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        return float(np.abs(logprobs_of(load(Path(scratch)), text) - logprobs).max())


if __name__ == "__main__":
    main(sys.argv[1:])
