"""A tiny model, a tokenizer for it, and engines around them that compile little, for the tests of the public API."""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
from pathlib import Path

import numpy as np

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.outputs import CompletionOutput
from ksana_jax.core.patterns import FULL
from ksana_jax.engine.build import build_engine
from ksana_jax.engine.settings import engine_config
from ksana_jax.kv.groups import group_layers
from ksana_jax.loading.load import open_model
from ksana_jax.methods.presets import read_patterns
from ksana_jax.models.params import init_params
from ksana_jax.scheduler.speculative import draft_lengths, draws_trees
from ksana_jax.scheduler.step.ladders import make_buckets
from ksana_jax.tokenizers import Tokenizer, TokenizerError
from ksana_jax.tokenizers.base import Piece
from tests.reference import reference_logprobs

BOS, EOS = 0, 1
# Letters, pairs of letters, and bytes that make characters only together: é is C3 A9, ü C3 BC, 😀 F0 9F 98 80.
_PIECES = [c.encode() for c in "abcdefghijklmnopqrstuvwxyz .,:<>/0123456789"]
_PIECES += [b"th", b"he", b"in", b"er", b"an", b"the", b"<u>", b"<a>"]
BYTES = (0xC3, 0xA9, 0xBC, 0xF0, 0x9F, 0x98, 0x80)
FIRST_BYTE = 2 + len(_PIECES)
_PIECES += [bytes([b]) for b in BYTES]
VOCAB = 64
CHAT = (
    "{{ bos_token }}{% for m in messages %}<u>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


class Letters(Tokenizer):
    """Longest match first. Ids beyond the pieces stand for nothing, as in a padded vocabulary."""

    source = "letters"
    vocab_size = VOCAB
    bos_id, eos_id, bos_token, eos_token = BOS, EOS, "<s>", "</s>"

    def __init__(self, chat_template: str | None = CHAT):
        self.chat_template = chat_template
        self._ids = {b"<s>": BOS, b"</s>": EOS} | {p: i + 2 for i, p in enumerate(_PIECES)}

    def piece(self, token_id: int) -> Piece:
        if token_id in (BOS, EOS):
            return Piece(b"<s>" if token_id == BOS else b"</s>", special=True)
        return Piece(_PIECES[token_id - 2] if 2 <= token_id < 2 + len(_PIECES) else b"")

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        data, ids = text.encode(), [BOS] if add_special_tokens else []
        while data:
            best = next((data[:n] for n in (4, 3, 2, 1) if data[:n] in self._ids), None)
            if best is None:
                raise TokenizerError(f"letters cannot express {text!r:.60}")
            ids.append(self._ids[best])
            data = data[len(best) :]
        return ids


class MoreThanRows(Letters):
    """Letters, and a picture whose id has no row in the embedding."""

    vocab_size = VOCAB + 1

    def piece(self, token_id: int) -> Piece:
        return Piece(b"<pic>", special=True) if token_id == VOCAB else super().piece(token_id)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        first, *others = text.split("<pic>")
        ids = super()._encode(first, add_special_tokens)
        for other in others:
            ids += [VOCAB, *super()._encode(other, False)]
        return ids


@functools.cache
def model():
    """Two layers with grouped heads; random weights large enough that greedy texts vary."""
    config = ModelConfig(
        vocab_size=VOCAB,
        d_model=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        d_ff=48,
        max_position=64,
        bos_id=BOS,
        eos_ids=(EOS,),
    )
    return config, init_params(config, seed=3, std=0.5)


SMALL = {"block_size": 16, "num_blocks": 16, "max_num_seqs": 4, "max_num_batched_tokens": 16, "query_tile": 16}
# What the compiled functions of one model depend on beside the shapes of a step: what a `Runner` is given of a config.
_OF_A_RUNNER = operator.attrgetter(
    "dtype",
    "quantization",
    "tensor_parallel_size",
    "kv_full_precision_layers",
    "num_blocks",
    "block_size",
    "max_repositioned_sinks",
    "embedding_device",
    "operators",
    "numerics",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "kept_tokens",
)
_programs: dict = collections.defaultdict(dict)


def make_llm(
    tokenizer: Tokenizer | None = None,
    pattern=None,
    programs: dict | None = None,
    folder: Path | None = None,
    **settings,
) -> LLM:
    """An engine with one bucket of each kind, so that it has three shapes of steps; engines that compile the same steps
    share them, unless a dict of programs is given. folder: of another model."""
    model_config, params = model() if folder is None else open_model(folder, settings.get("dtype", "f32"))
    patterns = read_patterns(pattern, model_config)
    config = engine_config(SMALL | settings).for_model(model_config, patterns)
    groups = tuple(group.layers for group in group_layers(patterns))
    selects = config.kv_selection and (config.kv_selection, [pattern == FULL for pattern in patterns])
    key = folder, _OF_A_RUNNER(config), groups, repr((config.kv_dtype, config.kv_eviction, selects))
    buckets = make_buckets(config, "cpu", draft_lengths(config), draws_trees(config))
    few = dataclasses.replace(
        buckets,
        decodes=buckets.decodes[-1:],
        tiles=buckets.tiles[-1:],
        widths=buckets.widths[-1:],
        verifications=buckets.verifications[-1:],
    )
    return LLM.around(
        build_engine(
            model_config,
            params,
            config,
            patterns=patterns,
            tokenizer=tokenizer,
            buckets=few,
            programs=_programs[key] if programs is None else programs,
        )
    )


def forget_programs() -> None:
    """Frees the programs that engines share, after these are closed."""
    _programs.clear()


def complete(llm: LLM, prompt="x.y", **given) -> CompletionOutput:
    """The one completion of one prompt; greedy, 24 tokens, past the end of sequence unless told otherwise."""
    [output] = llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True} | given))
    assert output.finished
    return output.outputs[0]


def tokens_of(llm: LLM, prompts, params) -> list[list[int]]:
    """Token ids of all completions of prompts (token ids, or dicts), in order; nothing is left running."""
    outputs = llm.generate([p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts], params)
    assert_idle(llm)
    return [c.token_ids for o in outputs for c in o.outputs]


def expect_dense(llm: LLM, config: ModelConfig, params, texts, pattern=None) -> None:
    """Log-probabilities of texts and of their continuations equal the float64 model's; so do tokens."""
    llm.set_pattern(pattern)
    asked = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": t} for t in texts], asked)
    for text, output in zip(texts, outputs, strict=True):
        whole = np.concatenate([text, output.outputs[0].token_ids])
        expected = reference_logprobs(params, config, whole, pattern)
        entries = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
        assert len(entries) == len(whole) and entries[0] is None
        got = np.array([entry[int(whole[t])].logprob for t, entry in enumerate(entries) if entry])
        # float32 against float64 through two layers: about 1e-5; 1e-4 is the contract.
        np.testing.assert_allclose(got, [expected[t - 1, whole[t]] for t in range(1, len(whole))], atol=1e-4)
        assert output.outputs[0].token_ids == expected[len(text) - 1 : -1].argmax(-1).tolist()


def assert_idle(llm: LLM) -> None:
    """Nothing runs or waits, and every block is back in the pool."""
    scheduler = llm.engine.scheduler
    scheduler.check()
    assert not scheduler.has_work and not llm.engine.requests and not llm.engine._watched
    assert scheduler.blocks.num_used == 0
