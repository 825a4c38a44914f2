"""Rows on transformers, lm-eval and kvpress, each where it is installed. See README.md."""

import contextlib
import json
import math
import types
from importlib.util import find_spec

import torch
from common import GGUF, HALF, LENGTH, WORK, compared, run, token_ids
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache

torch.set_grad_enabled(False)


def load(name: str = "smollm2", **settings):
    if not (WORK / name).exists():  # a folder of float32, which all packages read alike
        packed = AutoModelForCausalLM.from_pretrained(GGUF[name].parent, gguf_file=GGUF[name].name)
        del packed.config.quantization_config
        plain = AutoModelForCausalLM.from_config(packed.config, dtype=torch.float32)
        plain.load_state_dict(packed.state_dict())
        plain.save_pretrained(WORK / name)
    return AutoModelForCausalLM.from_pretrained(WORK / name, **settings).eval()


def load_tokenizer():
    """Returns SmolLM2's tokenizer, which transformers reads without the split of each digit that the file names."""
    made = AutoTokenizer.from_pretrained(GGUF["smollm2"].parent, gguf_file=GGUF["smollm2"].name)
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return made


def scores(model, ids: list[int], starts=(0,), cache=None, press=None, positions: bool = True) -> list[float]:
    """Returns log-probabilities of all tokens but the first, computed in parts; a press compresses the first part."""
    cache, found = DynamicCache() if cache is None else cache, []
    for a, b in zip(starts, [*starts[1:], len(ids)], strict=True):
        given = {"position_ids": torch.arange(a, b)[None]} if positions else {}
        with press(model) if press and not a else contextlib.nullcontext():
            logits = model(torch.tensor([ids[a:b]]), past_key_values=cache, **given).logits[0].float()
        after = torch.tensor(ids[a + 1 : b + 1])[:, None]
        found += logits[: len(after)].log_softmax(-1).gather(1, after)[:, 0].tolist()
    return found


def of_transformers():
    model, ids, parts = load(), token_ids(), (0, *range(HALF, LENGTH, 128))
    plain = scores(model, ids)
    (WORK / "exact.json").write_text(json.dumps(plain))  # for the other scripts
    yield "exact", {"dtype": "bfloat16", **compared(scores(load(dtype=torch.bfloat16), ids), plain)}
    for backend, axis, starts in (("quanto", 0, (0,)), ("quanto", 0, parts), ("quanto", -1, parts), ("hqq", 1, parts)):
        cache = QuantizedCache(backend, model.config, nbits=4, axis_key=axis, axis_value=axis)
        found = compared(scores(model, ids, starts, cache)[HALF:], plain[HALF:])
        yield "quantized_cache", {"backend": backend, "axis": axis, "parts": len(starts), **found}


def of_lm_eval():
    from lm_eval.models.huggingface import HFLM

    tokenizer, count = load_tokenizer(), 2048
    text = tokenizer.decode(token_ids(length=count))
    for settings in ({"max_length": 512}, {}, {"add_bos_token": True}):
        lm = HFLM(pretrained=load(), tokenizer=tokenizer, batch_size=1, **settings)
        nats = -float(lm.loglikelihood_rolling([types.SimpleNamespace(args=(text,))], disable_tqdm=True)[0])
        yield "lm_eval_rolling", {**settings, "nats": nats, "perplexity": math.exp(nats / count)}
    for name, count in {"word": len(text.split()), "byte": len(text.encode())}.items():
        yield "lm_eval_rolling", {**settings, f"perplexity_per_{name}": math.exp(nats / count)}


def of_kvpress():
    from kvpress import SnapKVPress

    model, press = load(), SnapKVPress(compression_ratio=0.5)
    try:  # positions that the model chooses, which are of the compressed cache, against the text's
        pair = (scores(model, token_ids(), (0, 768), None, press, given)[768:] for given in (False, True))
        yield "kvpress_positions", compared(*pair)
    except KeyError as error:
        yield "kvpress_positions", {"error": f"KeyError: {error}"}
        return
    cache = DynamicCache()
    with press(model):
        for part in torch.tensor([token_ids(length=768)]).split(256, dim=1):
            model(part, past_key_values=cache)
    yield "kvpress_chunks", {"context": 768, "kept": cache.get_seq_length()}
    # A passkey's log-probability, with the question inside and outside the compressed context.
    said = [" The pass key is 71432. Remember it.", " What is the pass key? The pass key is", " 71432"]
    key, asked, answer = load_tokenizer()(said, add_special_tokens=False).input_ids
    text = [*token_ids(length=700)[:350], *key, *token_ids(length=700)[350:]]
    for ratio in (0.0, 0.75):
        press, whole = SnapKVPress(compression_ratio=ratio), text + asked + answer
        cases = {"inside": len(text + asked) - 1, "outside": len(text)}
        found = {k: sum(scores(model, whole, (0, n), None, press)[-len(answer) :]) for k, n in cases.items()}
        yield "kvpress_question", {"ratio": ratio, **found}
    model, ids = load("gemma3-270m"), [2, *token_ids("gemma3-270m", 1023)]
    plain = []
    for ratio in (0.0, 0.5):
        found = scores(model, ids, (0, 768), cache := DynamicCache(), SnapKVPress(ratio))[768:]
        plain = plain or found
        kept = [layer.keys.shape[2] - 256 for layer in cache.layers[:6]]
        yield "kvpress_windows", {"ratio": ratio, "kept": kept, **compared(found, plain)}


if __name__ == "__main__":
    if find_spec("lm_eval"):
        run(of_transformers(), "transformers", "torch", "lm_eval")
        run(of_lm_eval(), "transformers", "torch", "lm_eval")
    run(of_kvpress(), "transformers", "torch", "kvpress")
