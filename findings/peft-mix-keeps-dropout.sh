#!/usr/bin/env bash
# PEFT 0.21.2: add_weighted_adapter on a model in eval mode makes an adapter whose dropout is on.
#
# Guess: eval() holds for the model, so an adapter made later of trained ones does not drop anything either.
# Seen: the new adapter gets dropout layers of its own, with the first adapter's rate and in training mode, although
# model.training is False. Its answers change from call to call until eval() is called once more. Adapters that load_adapter()
# reads are right.
# Hurt: whoever merges adapters in a loop over weights and evaluates each merge: the scores are those of a model with dropout, and
# the best weights are the luckiest.
# Versions: Python 3.11, PEFT 0.21.2, PyTorch 2.13.0, transformers 5.24.0. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q peft==0.21.2 torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - "$folder" <<'END'
import sys

import peft
import torch
import transformers

print(f"PEFT {peft.__version__}, PyTorch {torch.__version__}, transformers {transformers.__version__}")
torch.set_grad_enabled(False)
torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=64, vocab_size=50, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
)
settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4, lora_alpha=8, lora_dropout=0.1)
model = peft.get_peft_model(transformers.LlamaForCausalLM(config), settings, adapter_name="one").eval()
for name, values in model.named_parameters():
    if "lora_B" in name:
        values.normal_(0, 0.2)
model.save_pretrained(sys.argv[1])
tokens = torch.arange(3, 20)[None]


def apart(adapter):
    """Returns the most by which two calls with the same tokens differ, in nats."""
    model.set_adapter(adapter)
    first, second = (model(tokens).logits.log_softmax(-1) for _ in range(2))
    return float((first - second).abs().max())


model.load_adapter(f"{sys.argv[1]}/one", "loaded")
model.add_weighted_adapter(["one", "loaded"], [0.5, 0.5], "mix", combination_type="cat")
found = {name: apart(name) for name in ("one", "loaded", "mix")}
for name, nats in found.items():
    print(f"training is {model.training!s}; two calls with adapter {name:6} differ by {nats:.3f} nats")
model.eval()
print(f"after eval() once more, with adapter mix: {apart('mix'):.3f} nats")
assert not model.training and apart("mix") == found["one"] == found["loaded"] == 0, "the behaviour has changed"
assert found["mix"] > 0.01, "the behaviour has changed"
END
