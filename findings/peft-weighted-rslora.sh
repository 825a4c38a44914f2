#!/usr/bin/env bash
# PEFT 0.21.2: add_weighted_adapter makes rank-stabilised adapters sqrt(r) times too strong, and gives DoRA adapters other lengths.
#
# Guess: one adapter with weight 1.0 gives the same adapter under another name, whatever kind of LoRA it is.
# Seen: for plain LoRA it does. With use_rslora the change of the weights is multiplied by sqrt(r): 8 at rank 64, and the
# square root of the sum of the ranks with combination_type="cat". The combined adapter keeps use_rslora and sets
# lora_alpha to r, as if the scale were alpha / r. With use_dora the stored lengths are made anew from the model's weights,
# so what training did to them is lost. Nothing is logged, and the saved adapter has the same numbers.
# Hurt: whoever merges adapters by "cat", "linear", "svd" or "ties", or compares merging methods on adapters trained with
# rsLoRA or DoRA: the merge looks like a bad method.
# Versions: Python 3.11, PEFT 0.21.2, PyTorch 2.13.0, transformers 5.24.0. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q peft==0.21.2 torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'END'
import peft
import torch
import transformers

print(f"PEFT {peft.__version__}, PyTorch {torch.__version__}, transformers {transformers.__version__}")
config = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=64, vocab_size=50, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
)


@torch.no_grad()
def combined(how, rank, **kind):
    """Returns the norm of what a copy of an adapter adds to outputs, as a multiple of what the adapter adds, and their distance."""
    torch.manual_seed(0)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=rank, lora_alpha=16, **kind)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), settings, adapter_name="one")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_B["one"].weight.normal_(0, 0.1)
    for lengths in layer.lora_magnitude_vector.values():
        lengths.weight.mul_(1.3)
    model.add_weighted_adapter(["one"], [1.0], "copy", combination_type=how)
    x = torch.randn(5, 64)
    added = {}
    for name in ("one", "copy"):
        model.set_adapter(name)
        added[name] = layer(x) - layer.base_layer(x)
    one, copy = added["one"], added["copy"]
    return float(copy.norm() / one.norm()), float((copy - one).norm() / one.norm())


for how in ("cat", "linear", "svd"):
    for rank in (4, 64):
        plain, stabilised = combined(how, rank), combined(how, rank, use_rslora=True)
        print(f"{how:6} rank {rank:2}: LoRA {plain[0]:.3f} times, rsLoRA {stabilised[0]:.3f} times the adapter's change")
        assert abs(plain[0] - 1) < 0.01 and plain[1] < 0.01, "plain LoRA has changed"
        assert abs(stabilised[0] / rank**0.5 - 1) < 0.01, "rsLoRA has changed"
    distance = combined(how, 4, use_dora=True)[1]
    print(f"{how:6} rank  4: DoRA differs by {distance:.0%} of the adapter's change")
    assert distance > 0.1, "DoRA has changed"
END
