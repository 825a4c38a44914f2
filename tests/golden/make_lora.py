"""Makes tests/golden/lora: adapters of golden models, saved by PEFT, and what PEFT computes with them.

  pip install peft==0.21.2 torch==2.13.0 transformers==5.24.0
  python tests/golden/make_lora.py                  (seconds on a CPU)

One folder for each case, NAME of a golden model and of the adapter: adapter_config.json, adapter_model.safetensors, and
expected.npz with a prompt and the log-probabilities of every position [T, V] in float32, of PEFT's model. B and DoRA's
lengths are random, and B large enough that an adapter changes the model's log-probabilities by LEAST_EFFECT somewhere.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
LENGTH = 23
LEAST_EFFECT = 0.5
FILES = ("adapter_config.json", "adapter_model.safetensors")
GPT2 = ["c_attn", "c_proj", "c_fc"]
# By golden model: adapters by name. The first model's are served together.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "llama-gqa-tied": {
        "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        "all": {
            "r": 3,
            "lora_alpha": 5,
            "use_rslora": True,
            "target_modules": "all-linear",
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, "up_proj": 6},
            "alpha_pattern": {"mlp.*": 7, "o_proj": 16},
        },
        "lengths": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        "one-layer": {"r": 2, "lora_alpha": 6, "target_modules": ["k_proj", "gate_proj"], "layers_to_transform": [1]},
    },
    "phi3-gqa-window-rope-long": {"fused": {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "gate_up_proj"]}},
    "glm4-gqa-rope-partial-biases": {
        "rotated": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        "lengths": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "use_dora": True},
    },
    "gpt2-mha-positions-biases-tied": {
        "transposed": {"r": 4, "lora_alpha": 8, "target_modules": GPT2, "fan_in_fan_out": True},
        "lengths": {"r": 4, "lora_alpha": 8, "target_modules": GPT2, "fan_in_fan_out": True, "use_dora": True},
    },
    "qwen2-mha-window": {"biases": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}},
}


def logprobs(model: Any, prompt: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        scores = model(torch.tensor(prompt[None].astype(np.int64))).logits[0].double()
    return torch.log_softmax(scores, -1).float().numpy()


def make(base: str, name: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(zlib.crc32(f"{base} {name}".encode()))
    model = AutoModelForCausalLM.from_pretrained(HERE / base, attn_implementation="eager", dtype=torch.float32).eval()
    prompt = torch.randint(2, model.config.vocab_size, (LENGTH,)).numpy().astype(np.int32)
    before = logprobs(model, prompt)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    with torch.no_grad():
        for parameter, values in adapted.named_parameters():
            if "lora_B" in parameter:
                values.copy_(torch.randn_like(values) * 0.2)
            elif "lora_magnitude" in parameter:
                values.mul_(1 + torch.randn_like(values) * 0.2)
    after = logprobs(adapted, prompt)
    assert np.abs(after - before).max() > LEAST_EFFECT, f"{base} {name} changes too little"
    folder = HERE / "lora" / f"{base}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as saved:
        adapted.base_model.model.name_or_path = adapted.peft_config["default"].base_model_name_or_path = base
        adapted.save_pretrained(saved)
        for file in FILES:
            shutil.copy(Path(saved) / file, folder / file)
    np.savez(folder / "expected.npz", prompt=prompt, logprobs=after)


if __name__ == "__main__":  # names: cases to make; all without
    for of_base, adapters in CASES.items():
        for of_name, given in adapters.items():
            if not sys.argv[1:] or f"{of_base}-{of_name}" in sys.argv[1:]:
                make(of_base, of_name, given)
