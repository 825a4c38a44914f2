#!/usr/bin/env bash
# PEFT 0.21.2: with ensure_weight_tying=True, merging a LoRA of a tied output head adds its change twice.
#
# Guess: ensure_weight_tying makes merging right, as PEFT's warning about tied embeddings says: embedding and head get one adapter
# and stay one matrix.
# Seen: before merging that holds: both modules add the same change to the same matrix. merge_and_unload() then adds it once for
# each module, so the matrix has it twice. Without the option the matrix has it once, which changes the other module too.
# The same warning of possible complications comes with and without the option. The saved model has the wrong matrix.
# Hurt: whoever fine-tunes the head or the embeddings of a small model, most of which are tied, follows the warning, and ships the
# merged model: it was right in every evaluation before the merge.
# Versions: Python 3.11, PEFT 0.21.2, PyTorch 2.13.0, transformers 5.24.0. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q peft==0.21.2 torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - <<'END'
import peft
import torch
import transformers

print(f"PEFT {peft.__version__}, PyTorch {torch.__version__}, transformers {transformers.__version__}")
torch.set_grad_enabled(False)
config = transformers.LlamaConfig(
    hidden_size=64,
    intermediate_size=64,
    vocab_size=50,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
tokens = torch.arange(3, 20)[None]


def merged(module, ensured):
    """Returns how often the tied matrix has the change after merging, and how much that moves log-probabilities."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    before = model.lm_head.weight.clone()
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=[module], r=4, lora_alpha=8, ensure_weight_tying=ensured
    )
    adapted = peft.get_peft_model(model, settings).eval()
    for name, values in adapted.named_parameters():
        if "lora_" in name:
            values.normal_(0, 0.1)
    [change, *others] = [m.get_delta_weight("default") for m in adapted.modules() if hasattr(m, "get_delta_weight")]
    assert len(others) == ensured and all(torch.equal(change, other) for other in others)
    expected = adapted(tokens).logits.log_softmax(-1)
    plain = adapted.merge_and_unload()
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    found = (plain.lm_head.weight - before).flatten()
    times = float(found @ change.flatten() / change.norm() ** 2)
    return times, float((plain(tokens).logits.log_softmax(-1) - expected).abs().max())


for module in ("lm_head", "embed_tokens"):
    for ensured in (False, True):
        times, nats = merged(module, ensured)
        print(f"LoRA of {module:12}  ensure_weight_tying={ensured!s:5}  the merged matrix has the change {times:.3f} times, {nats:.1f} nats off")
        assert abs(times - (2 if ensured else 1)) < 0.01, "the behaviour has changed"
END
