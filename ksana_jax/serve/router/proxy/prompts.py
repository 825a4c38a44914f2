"""Token ids of the prompts that pass through the proxy, for the index. Knows no servers.

They decide the route of a request, never its answer: the server tokenizes the prompt again. A prompt without ids
is routed by load alone.
"""

from __future__ import annotations

import collections
import re
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from ksana_jax.tokenizers import Tokenizer, render_chat

# Fields of a request that, with its messages, make a conversation's prompt.
CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")
# Characters of all texts in the cache, and of the shortest that is kept there.
MAX_CACHED_CHARS = 2**24
MIN_CACHED_CHARS = 256


class PromptReader:
    """Turns prompts into token ids with a model's own tokenizer; the ids of long texts between special tokens are kept.

    System prompts and earlier turns of a conversation are such texts. Special tokens are boundaries that no token
    crosses, so that ids of the parts are ids of the whole; where a probe says otherwise, all is tokenized again.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._cache: collections.OrderedDict[str, list[int]] = collections.OrderedDict()
        self._num_chars, self._lock = 0, threading.Lock()
        specials = _special_texts(tokenizer)
        self._split = re.compile("(" + "|".join(map(re.escape, specials)) + ")").split if specials else None
        if specials and not self._parts_make_the_whole(specials[0]):
            self._split = None

    @property
    def reads_chats(self) -> bool:
        """True if the model has a chat template; without one, only a server knows how messages become a prompt."""
        return self._tokenizer.chat_template is not None

    def completion(self, prompt: str, add_special_tokens: bool = True) -> np.ndarray:
        """Returns the ids of a text, int32 [T]; raises ValueError as `Tokenizer.encode`."""
        return np.array(self._tokenizer.encode(prompt, add_special_tokens), np.int32)

    def chat(self, asked: Mapping[str, Any]) -> np.ndarray:
        """Returns the ids of a request's conversation, int32 [T].

        Raises:
          ValueError: there is no template, or it refuses the messages.
        """
        options = {name: asked[name] for name in CHAT_FIELDS if asked.get(name) is not None}
        return np.array(self._encode(render_chat(self._tokenizer, asked["messages"], **options)), np.int32)

    def _encode(self, text: str) -> list[int]:
        if self._split is None or len(text) < MIN_CACHED_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        rest = ""
        for part in self._split(text):
            if len(part) < MIN_CACHED_CHARS:
                rest += part
                continue
            ids += self._tokenizer.encode(rest, add_special_tokens=False) if rest else []
            ids += self._cached(part)
            rest = ""
        return ids + (self._tokenizer.encode(rest, add_special_tokens=False) if rest else [])

    def _cached(self, part: str) -> list[int]:
        with self._lock:
            if (found := self._cache.get(part)) is not None:
                self._cache.move_to_end(part)
                return found
        found = self._tokenizer.encode(part, add_special_tokens=False)
        with self._lock:
            if part not in self._cache:
                self._cache[part] = found
                self._num_chars += len(part)
            while self._num_chars > MAX_CACHED_CHARS:
                self._num_chars -= len(self._cache.popitem(last=False)[0])
        return found

    def _parts_make_the_whole(self, special: str) -> bool:
        def encode(text: str) -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=False)

        parts = [special, "A  first part. ", special, "\nand another", special, " one more "]
        return encode("".join(parts)) == [i for part in parts for i in encode(part)]


def _special_texts(tokenizer: Tokenizer) -> list[str]:
    """Returns the texts of a tokenizer's special tokens, longest first."""
    pieces = (tokenizer.piece(token) for token in range(tokenizer.vocab_size))
    texts = {piece.data.decode("utf-8", "replace") for piece in pieces if piece.special and piece.data}
    return sorted(texts, key=lambda text: (-len(text), text))
