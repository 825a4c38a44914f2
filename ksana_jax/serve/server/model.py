"""The served model: names, limits, tokenizer. Knows no requests."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Sequence

from ksana_jax import __version__
from ksana_jax.core.lora import LoRARequest
from ksana_jax.core.sources import display_name, model_path
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.loading.digest import digest_of_files
from ksana_jax.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The model that a server serves.

    Args:
      names: accepted in requests; answers carry the first.
      tokenizer: None serves token ids only.
      max_model_len: maximum tokens of prompt plus output.
      fingerprint: of weights and settings of the engine; equal ones give equal tokens to equal seeds.
      created: Unix time in seconds.
      adapters: of the model, by the names under which requests choose them; the owner loads and unloads them.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer | None
    max_model_len: int
    vocab_size: int
    fingerprint: str
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    adapters: dict[str, LoRARequest] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.names[0]

    @functools.cached_property
    def special_ids(self) -> dict[str, int]:
        """Ids of the special tokens by their texts."""
        pieces = {} if self.tokenizer is None else {i: self.tokenizer.piece(i) for i in self.tokenizer.added_ids}
        return {piece.data.decode(errors="replace"): i for i, piece in pieces.items() if piece.special and piece.data}

    @functools.cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)


class TokenTexts:
    """Texts and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self.bytes_of = functools.lru_cache(maxsize=2**16)(self._bytes_of)
        self.name_of = functools.lru_cache(maxsize=2**16)(self._name_of)
        self.text_of = functools.lru_cache(maxsize=2**16)(lambda token: self.bytes_of(token).decode("utf-8", "replace"))

    def _bytes_of(self, token: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.piece(token).data

    def _name_of(self, token: int) -> str:
        """Returns the token's text; of bytes that are no text, "bytes:\\xe2\\x80", as OpenAI writes them."""
        data = self.bytes_of(token)
        if self._tokenizer is None:
            return f"token_id:{token}"
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def served_model(llm: AsyncLLM, names: Sequence[str], adapters: Sequence[LoRARequest] = ()) -> ServedModel:
    """Returns the description of an engine's model.

    Args:
      names: empty takes the name under which it was loaded. adapters: of the model.
    """
    return ServedModel(
        tuple(names) or (_name(llm),),
        llm.tokenizer,
        llm.max_model_len,
        llm.model_config.vocab_size,
        _fingerprint(llm),
        adapters={adapter.lora_name: adapter for adapter in adapters},
    )


def _name(llm: AsyncLLM) -> str:
    """Returns the name of the loaded model, or the last part of its path: clients need not know the rest."""
    return "ksana" if llm.llm is None else display_name(llm.llm.name) or "ksana"


def _fingerprint(llm: AsyncLLM) -> str:
    """Returns a digest of the model's files and the engine's settings."""
    digest = hashlib.sha256(json.dumps(llm.config.plain(), sort_keys=True, default=str).encode())
    digest.update(f"{__version__} {llm.model_config}".encode())
    if llm.llm is not None:
        digest.update(str(llm.llm.patterns).encode())
    if llm.engine.source is not None:
        name, load_format = llm.engine.source
        digest.update(digest_of_files(model_path(name, weights=load_format != "dummy"), load_format).encode())
    return f"fp_{digest.hexdigest()[:16]}"
