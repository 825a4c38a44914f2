"""Reads the router's inputs from a request: prompt, lengths, client. The body is passed on unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ksana_jax.core.lora import salted
from ksana_jax.serve.router import hashes_of
from ksana_jax.serve.router.proxy.prompts import CHAT_FIELDS, PromptReader

# Bytes of a body that are parsed and tokenized in the event loop, at about 1 ms; larger ones take a thread.
SHORT_BODY = 4096
# Bytes of a body that are read at all; the prompts of larger ones are routed by their length alone.
LONGEST_READ = 2**20
# Seconds until a prompt that is not read yet is routed by its length alone.
READ_TIMEOUT_S = 1.0
# Seconds for which servers are not asked to tokenize after one of them did not.
PAUSE_S = 10.0
CHARS_PER_TOKEN = 4
DEFAULT_MAX_TOKENS, MAX_TOKENS = 16, 2**31 - 1
CHAT = "/v1/chat/completions"

# Asks a server to tokenize: the body of POST /tokenize -> token ids.
AskTokens = Callable[[dict[str, Any]], Awaitable[list[int]]]


@dataclasses.dataclass(frozen=True)
class PromptFacts:
    """Facts about a request: tokens of the prompt, counted or estimated; a hash for each full block of it; output
    tokens asked for; the model, if it is known."""

    num_tokens: int
    hashes: list[bytes]
    max_tokens: int
    model: str | None = None


class RequestReader:
    """Finds the prompt of a request, tokenizes it and computes its hash chain.

    Args:
      prompts: tokenizes on this machine; None asks a server.
      ask: asks a server, for all prompts or for conversations whose template is not here; raises OSError.
      block_size: tokens for which there is one hash.

    Attributes:
      model: fingerprint of the served model, part of the hashes; empty as long as no server has told it.
      adapters: what divides the hashes by the model of a request: digests of adapters, and the models if there are
        several.
    """

    def __init__(self, prompts: PromptReader | None, ask: AskTokens, block_size: int):
        self._prompts, self._ask, self._block_size = prompts, ask, block_size
        self.model = ""
        self.adapters: Mapping[str, str] = {}
        self._threads = ThreadPoolExecutor(2, "tokenize")
        self._asks_from_s = 0.0

    @property
    def tokenizes(self) -> bool:
        """True if texts are tokenized on this machine."""
        return self._prompts is not None

    def use(self, prompts: PromptReader | None) -> None:
        """Sets the tokenizer on this machine; None asks a server."""
        self._prompts = prompts

    async def read(self, path: str, body: bytes, salt: str) -> PromptFacts:
        """Returns the facts about a request; of an invalid one only its length, because the server will report
        the error.

        Args:
          salt: of the client's key; the body may divide it further, by cache_salt.
        """
        asked: Any = None
        try:
            if len(body) > LONGEST_READ:
                return _unread(body, asked)
            if len(body) <= SHORT_BODY:
                asked = json.loads(body)
                ids = self._local(path, asked)
            else:
                asked, ids = await asyncio.wait_for(self._in_thread(path, body), READ_TIMEOUT_S)
            if ids is None:
                ids = await self._from_server(path, asked)
            if ids.ndim != 1:
                return _unread(body, asked)
            given = asked.get("cache_salt")
            salt = salt if given is None else f"{salt}/{given}"
            if (digest := self.adapters.get(asked.get("model"))) is not None:
                salt = salted(digest, salt)
            hashes = hashes_of(ids, self._block_size, salt, self.model)
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError, OSError):
            return _unread(body, asked)
        max_tokens = asked.get("max_completion_tokens") or asked.get("max_tokens")
        usable = type(max_tokens) is int and 0 <= max_tokens <= MAX_TOKENS
        return PromptFacts(len(ids), hashes, max_tokens if usable else DEFAULT_MAX_TOKENS, _model(asked))

    async def token_ids(self, text: str) -> np.ndarray | None:
        """Returns the ids of the prompt of a completion, int32 [T]; None if no server can be asked now."""
        try:
            if self._prompts is not None:
                return self._prompts.completion(text)
            return await self._from_server("/v1/completions", {"prompt": text})
        except (ValueError, OSError):
            return None

    async def _in_thread(self, path: str, body: bytes) -> tuple[Any, np.ndarray | None]:
        def parse() -> tuple[Any, np.ndarray | None]:
            asked = json.loads(body)
            return asked, self._local(path, asked)

        return await asyncio.get_running_loop().run_in_executor(self._threads, parse)

    def _local(self, path: str, asked: dict[str, Any]) -> np.ndarray | None:
        """Returns the ids of a prompt, if no server is needed for it."""
        if path == CHAT:
            reads = self._prompts is not None and self._prompts.reads_chats
            return self._prompts.chat(asked) if reads and self._prompts is not None else None
        prompt = asked["prompt"]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]  # several prompts follow the first one's best server
        if not isinstance(prompt, str):
            return np.array(prompt, np.int32)
        if self._prompts is None:
            return None
        return self._prompts.completion(prompt, asked.get("add_special_tokens", True) is not False)

    async def _from_server(self, path: str, asked: dict[str, Any]) -> np.ndarray:
        prompt = asked.get("prompt")
        if isinstance(prompt, list):
            prompt = prompt[0]
        names = ("messages", *CHAT_FIELDS) if path == CHAT else ("add_special_tokens",)
        body = {name: asked[name] for name in ("model", *names) if name in asked}
        body |= {} if path == CHAT else {"prompt": prompt}
        if time.monotonic() < self._asks_from_s:
            raise OSError("a server did not tokenize a moment ago")
        try:
            return np.array(await asyncio.wait_for(self._ask(body), READ_TIMEOUT_S), np.int32)
        except (OSError, TimeoutError):
            self._asks_from_s = time.monotonic() + PAUSE_S
            raise

    def close(self) -> None:
        """Ends its threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def model_of(body: bytes) -> str | None:
    """Returns the model that a short body asks for; None if it cannot be read, or names none."""
    with contextlib.suppress(ValueError, RecursionError):
        return _model(json.loads(body)) if len(body) <= LONGEST_READ else None
    return None


def _model(asked: Any) -> str | None:
    model = asked.get("model") if isinstance(asked, dict) else None
    return model if isinstance(model, str) else None


def _unread(body: bytes, asked: Any) -> PromptFacts:
    return PromptFacts(max(len(body) // CHARS_PER_TOKEN, 1), [], DEFAULT_MAX_TOKENS, _model(asked))
