"""Small tokenizers of every kind, trained when the tests run."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from ksana_jax.tokenizers import load_tokenizer, render_chat

TEXT = """A cache keeps the keys and the values of all tokens that came before, so that a step computes one token only.
The first tokens of a text draw attention whatever they say; a window that forgets them forgets how to write.
for index in range(10):
    print(index, "of", 10)   # three spaces, then a comment
Blocks of sixteen slots are taken from a pool and go back to it when no later query can see them any more.
Größe und Maß, déjà vu, naïve façade: einige Wörter mit Umlauten, quelques mots avec des accents.
Слово за слово, блок за блоком. 日本語の文章も少しだけあります。
""".splitlines()

HELLO = [{"role": "user", "content": "hello"}]
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sentencepiece_model(**options) -> bytes:
    model = io.BytesIO()
    settings = {"vocab_size": 420, "model_type": "bpe", "byte_fallback": True, "character_coverage": 0.99} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 3), model_writer=model, minloglevel=2, num_threads=1, **settings
    )
    return model.getvalue()


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it: BPE over bytes, with the tokens of a chat format added."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_special_tokens(["<|begin|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "two words"])
    begin = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    return tokenizer


def llama_like() -> tokenizers.Tokenizer:
    """As Llama 2's tokenizer.json: marks for spaces, bytes as a fallback, one space stripped at the start."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, *dict.fromkeys("▁abcdefghijklmnopqrstuvwxyzé")])}
    vocabulary |= {"th": len(vocabulary), "the": len(vocabulary) + 1, "▁the": len(vocabulary) + 2}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return tokenizer


SENTENCEPIECE = {
    "sentencepiece": {},  # sentencepiece's own defaults
    "sentencepiece-llama": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "sentencepiece-exact": {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["\n"],
    },
    "sentencepiece-no-bytes": {"byte_fallback": False, "model_type": "unigram", "vocab_size": 120},
}
JSON = {"byte-level": byte_level, "llama-like": llama_like, "metaspace": metaspace}


@pytest.fixture(scope="session")
def directories(tmp_path_factory) -> dict[str, Path]:
    """A model directory for each kind, by name."""
    found = {name: tmp_path_factory.mktemp(name) for name in [*SENTENCEPIECE, *JSON]}
    for name, options in SENTENCEPIECE.items():
        (found[name] / "tokenizer.model").write_bytes(sentencepiece_model(**options))
    for name, make in JSON.items():
        make().save(str(found[name] / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHAT}
    (found["byte-level"] / "tokenizer_config.json").write_text(json.dumps(config))
    return found


@pytest.fixture(scope="module")
def tokenizer(directories):
    return load_tokenizer(directories["byte-level"])


@pytest.fixture
def render(tokenizer, monkeypatch):
    """Renders a template's source."""

    def render(template, messages=HELLO, **options):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        return render_chat(tokenizer, messages, **options)

    return render
