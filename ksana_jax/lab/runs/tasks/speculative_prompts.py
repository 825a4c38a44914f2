"""Prompts for speculative decoding: texts to continue, to repeat, to talk about, and texts that many requests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ksana_jax.lab.runs.texts import ExcerptSpec, draw_excerpts
from ksana_jax.tokenizers.chat import render_chat

# Prompts `shared`: number of requests with the same text, and of private tokens before it.
_SHARING, _OWN_TOKENS = 8, 8


def free(files: Sequence[str], tokenizer: Any, num_prompts: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Returns excerpts: what follows them is new."""
    return [excerpt.ids for excerpt in draw_excerpts(files, tokenizer, num_prompts, ExcerptSpec(num_tokens), seed)]


def edit(files: Sequence[str], tokenizer: Any, num_prompts: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Returns excerpts of three quarters of the tokens, each followed by its own beginning, as if it were written again
    with some changes: a model that has noticed it copies the rest."""
    again = num_tokens // 4
    heads = draw_excerpts(files, tokenizer, num_prompts, ExcerptSpec(num_tokens - again), seed)
    return [[*head.ids, *head.ids[1 : 1 + again]] for head in heads]


def shared(files: Sequence[str], tokenizer: Any, num_prompts: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Returns prompts that begin with a few private tokens and continue with a shared text, as agents
    send the same instructions and files again and again."""
    common = free(files, tokenizer, -(-num_prompts // _SHARING), num_tokens - _OWN_TOKENS, seed)
    own = free(files, tokenizer, num_prompts, _OWN_TOKENS + 1, seed)
    return [[*mine, *common[i % len(common)][1:]] for i, mine in enumerate(own)]


def chat(files: Sequence[str], tokenizer: Any, num_prompts: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Returns a question about each of some excerpts, in the model's chat template.

    Raises:
      ValueError: the model has no template, or the template alone has as many tokens.
    """
    mark = "|excerpt|"
    question = f"Explain this text to a beginner, in your own words.\n\n{mark}"
    before, _, after = render_chat(tokenizer, [{"role": "user", "content": question}]).partition(mark)
    head, tail = (tokenizer.encode(text, add_special_tokens=False) for text in (before, after))
    if (room := num_tokens - len(head) - len(tail)) < 1:
        raise ValueError(f"{num_tokens} tokens, of which the chat template and the question take {num_tokens - room}")
    excerpts = draw_excerpts(files, tokenizer, num_prompts, ExcerptSpec(room, bos=False), seed)
    return [[*head, *excerpt.ids, *tail] for excerpt in excerpts]


PROMPTS: dict[str, Callable[..., list[list[int]]]] = {"free": free, "edit": edit, "chat": chat, "shared": shared}
