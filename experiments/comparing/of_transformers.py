"""Rows on transformers, kvpress and lm-eval. See README.md."""

import contextlib
import json
import math
import sys
import types

import torch
import transformers
from common import GGUF, HALF, LENGTH, WORK, attempted, compared, perplexity, row, run, token_ids
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache

transformers.logging.set_verbosity_error()
torch.set_grad_enabled(False)


def load(name: str = "smollm2", **settings):
    if not (WORK / name).exists():  # a folder of float32, which all packages read alike
        packed = AutoModelForCausalLM.from_pretrained(GGUF[name].parent, gguf_file=GGUF[name].name)
        del packed.config.quantization_config
        plain = AutoModelForCausalLM.from_config(packed.config, dtype=torch.float32)
        plain.load_state_dict(packed.state_dict())
        plain.save_pretrained(WORK / name)
    return AutoModelForCausalLM.from_pretrained(WORK / name, **settings).eval()


def gguf_tokenizer(split_digits: bool = True):
    """Returns SmolLM2's tokenizer as transformers reads it, or split as its file says: each digit alone."""
    made = AutoTokenizer.from_pretrained(GGUF["smollm2"].parent, gguf_file=GGUF["smollm2"].name)
    if split_digits:
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


@row
def exact():
    """Also writes the log-probabilities in float32 for the other scripts."""
    found = scores(load(), token_ids())
    (WORK / "exact.json").write_text(json.dumps(found))
    yield {"perplexity": perplexity(found)}
    yield {"dtype": "bfloat16", **compared(scores(load(dtype=torch.bfloat16), token_ids()), found)}


@row
def quantized_cache():
    model, ids, parts = load(), token_ids(), (0, *range(HALF, LENGTH, 128))
    plain = scores(model, ids)[HALF:]
    for backend, axis, starts in (("quanto", 0, (0,)), ("quanto", 0, parts), ("quanto", -1, parts), ("hqq", 1, parts)):
        cache = QuantizedCache(backend, model.config, nbits=4, axis_key=axis, axis_value=axis)
        found = attempted(lambda: compared(scores(model, ids, starts, cache)[HALF:], plain))  # noqa: B023
        yield {"backend": backend, "axis": axis, "parts": len(starts), **found}


@row
def sliding_cache():
    model, ids = load("gemma3-270m"), [2, *token_ids("gemma3-270m", 1500)]
    starts, plain = range(0, 1501, 128), None
    for name, cache in (("config", DynamicCache(config=model.config)), ("no config", DynamicCache())):
        found = scores(model, ids, starts, cache)
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / 2**20
        yield {"cache": name, "mib": size, **compared(found, plain or found)}
        plain = found


@row
def lm_eval_rolling():
    from lm_eval.models.huggingface import HFLM

    tokenizer = gguf_tokenizer()
    text = tokenizer.decode(token_ids(length=2048))
    count, request = 2048, types.SimpleNamespace(args=(text,))
    for settings in ({"max_length": 512}, {}, {"add_bos_token": True}):
        lm = HFLM(pretrained=load(), tokenizer=tokenizer, batch_size=1, **settings)
        nats = -float(lm.loglikelihood_rolling([request], disable_tqdm=True)[0])
        yield {**settings, "nats": nats, "perplexity": math.exp(nats / count)}
    units = {"word": len(text.split()), "byte": len(text.encode())}
    yield {**settings, **{f"perplexity_per_{name}": math.exp(nats / count) for name, count in units.items()}}


@row
def kvpress_positions():
    """Compresses 768 tokens, and reads 256 with the positions of the text or, as `model` chooses, of the cache."""
    import kvpress

    def measured():
        model, ids, parts = load(), token_ids(), (0, 768)
        press = kvpress.SnapKVPress(compression_ratio=0.5)
        return compared(*(scores(model, ids, parts, None, press, positions)[768:] for positions in (False, True)))

    yield attempted(measured)


@row
def kvpress_chunks():
    import kvpress

    model, cache, ids = load(), DynamicCache(), torch.tensor([token_ids(length=768)])
    with kvpress.SnapKVPress(compression_ratio=0.5)(model):
        for part in ids.split(256, dim=1):
            model(part, past_key_values=cache)
    yield {"context": 768, "kept": cache.get_seq_length()}


@row
def kvpress_windows():
    import kvpress

    model, ids = load("gemma3-270m"), [2, *token_ids("gemma3-270m", 1023)]
    for ratio in (0.0, 0.25):
        cache = DynamicCache()
        found = scores(model, ids, (0, 768), cache, kvpress.KnormPress(compression_ratio=ratio))[768:]
        yield {
            "ratio": ratio,
            "kept": [layer.keys.shape[2] - 256 for layer in cache.layers][:6],
            "perplexity": perplexity(found),
        }


@row
def kvpress_question():
    """Log-probability of the five digits of a passkey, with the question inside and outside the compressed context."""
    import kvpress

    model, encode, ids = load(), gguf_tokenizer().encode, token_ids(length=700)
    text = [*ids[:350], *encode(" The pass key is 71432. Remember it."), *ids[350:]]
    asked, answer = encode(" What is the pass key? The pass key is"), encode(" 71432")
    for ratio in (0.0, 0.75):
        press = kvpress.SnapKVPress(compression_ratio=ratio)
        parts = {"inside": len(text + asked) - 1, "outside": len(text)}
        found = {
            k: sum(scores(model, text + asked + answer, (0, n), None, press)[-len(answer) :]) for k, n in parts.items()
        }
        yield {"ratio": ratio, **found}


if __name__ == "__main__":
    run("transformers", "torch", "kvpress" if any("kvpress" in name for name in sys.argv) else "lm_eval")
