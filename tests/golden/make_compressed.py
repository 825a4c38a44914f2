"""Makes tests/golden/compressed: checkpoints of the package compressed-tensors, and the numbers that it reads in them.

  pip install compressed-tensors==0.20.0 torch==2.13.0 transformers==5.24.0
  python tests/golden/make_compressed.py              (seconds on a CPU)

Each folder has a Llama of one layer with random weights, in one scheme of `SCHEMES`, as save_pretrained writes it, and
expected.npz with every decompressed matrix in float32. Scales are float32, so that its products are not rounded twice.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from compressed_tensors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).with_name("compressed")
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "vocab_size": 8,
    "num_hidden_layers": 1,
    "tie_word_embeddings": True,
}
CONFIG |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "eos_token_id": 2}

INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FP8 = INT8 | {"type": "float"}
# Format, settings of the weights, and of the activations.
SCHEMES: dict[str, tuple[str, dict, dict | None]] = {
    "w4a16": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16}, None),
    "w4a16-zeros": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}, None),
    "w4a16-channel-zeros": ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": False}, None),
    "w8a16": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 16}, None),
    "w8a8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, INT8),
    "w8a8-zeros": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, INT8),
    "w8a8-tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, INT8),
    "fp8": ("float-quantized", {"num_bits": 8, "strategy": "channel", "type": "float"}, FP8),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "strategy": "tensor", "type": "float"}, FP8),
    "fp8-block": (
        "float-quantized",
        {"num_bits": 8, "strategy": "block", "type": "float", "block_structure": [12, 20]},
        FP8,
    ),
}


def fill(linear: torch.nn.Module, args: dict) -> None:
    """Sets scales and zeros of a layer at random, so that all differ."""
    scale = linear.weight_scale.data
    largest = linear.weight.abs().max() / (448 if args.get("type") == "float" else 2 ** (args["num_bits"] - 1))
    scale.copy_(largest * (0.3 + torch.rand_like(scale)))
    if not args.get("symmetric", True):
        half = 2 ** (args["num_bits"] - 1)
        zeros = linear.weight_zero_point.data
        zeros.copy_(torch.randint(-half, half, zeros.shape))


@torch.no_grad()
def main() -> None:
    for name, (kind, args, inputs) in SCHEMES.items():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
        scheme = QuantizationScheme(
            targets=["Linear"],
            weights=QuantizationArgs(**{"type": "int", **args}),
            input_activations=QuantizationArgs(**inputs) if inputs else None,
            format=kind,
        )
        config = QuantizationConfig(
            config_groups={"group_0": scheme}, ignore=["lm_head"], format=kind, quantization_status="frozen"
        )
        apply_quantization_config(model, config)
        for linear in model.modules():
            if hasattr(linear, "weight_scale"):
                fill(linear, args)
        compressor = ModelCompressor.from_pretrained_model(model, quantization_format=kind)
        compressor.compress_model(model)
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        compressor.update_config(folder)
        (folder / "generation_config.json").unlink()
        compressor.decompress_model(model)
        found = {
            f"{name}.weight": m.weight.float().numpy()
            for name, m in model.named_modules()
            if hasattr(m, "weight_scale")
        }
        np.savez_compressed(folder / "expected.npz", **found)


if __name__ == "__main__":
    main()
