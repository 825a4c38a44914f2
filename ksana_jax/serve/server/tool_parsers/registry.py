"""All parsers of tool calls, by the names of vLLM's `--tool-call-parser`, and the choice among them."""

from __future__ import annotations

from ksana_jax.serve.server.tool_parsers.base import ToolParser
from ksana_jax.serve.server.tool_parsers.deepseek import DEEPSEEK, DEEPSEEK_V3
from ksana_jax.serve.server.tool_parsers.gemma import GEMMA
from ksana_jax.serve.server.tool_parsers.gemma4 import GEMMA4
from ksana_jax.serve.server.tool_parsers.harmony import HARMONY
from ksana_jax.serve.server.tool_parsers.hermes import HERMES, SMOLLM
from ksana_jax.serve.server.tool_parsers.llama import LLAMA
from ksana_jax.serve.server.tool_parsers.mistral import MISTRAL, MISTRAL_ARGS
from ksana_jax.serve.server.tool_parsers.pythonic import PYTHONIC
from ksana_jax.serve.server.tool_parsers.tagged import DEEPSEEK_V32, QWEN3_XML

# A template may have the marks of several: the first one is taken.
PARSERS: dict[str, ToolParser] = {
    "openai": HARMONY,
    "deepseek_v32": DEEPSEEK_V32,
    "qwen3_xml": QWEN3_XML,
    "gemma4": GEMMA4,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK,
    "mistral_args": MISTRAL_ARGS,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "pythonic": PYTHONIC,
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "smollm": SMOLLM,
}


def parser_for(template: str) -> ToolParser:
    """Returns the parser for models with a chat template; that of Llama for one without a known mark."""
    return next((one for one in PARSERS.values() if any(mark in template for mark in one.templates)), LLAMA)
