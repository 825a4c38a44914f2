"""Tokenizers: text to token ids and back. Knows no models, no jax.

`load_tokenizer` reads a Hugging Face directory; `IncrementalDetokenizer` turns ids into text as they arrive, and also
implements `Tokenizer.decode`; `render_chat` formats messages with the model's chat template.
"""

from ksana_jax.tokenizers.base import IncrementalDetokenizer, Tokenizer
from ksana_jax.tokenizers.chat import ChatTemplateError, render_chat
from ksana_jax.tokenizers.files import TokenizerError
from ksana_jax.tokenizers.load import find_tokenizer, load_tokenizer

__all__ = [
    "find_tokenizer",
    "load_tokenizer",
    "Tokenizer",
    "TokenizerError",
    "IncrementalDetokenizer",
    "render_chat",
    "ChatTemplateError",
]
