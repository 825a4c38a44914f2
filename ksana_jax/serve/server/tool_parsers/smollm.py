"""<tool_call>[{"name": ..., "arguments": {...}}, ...]</tool_call>: SmolLM2, whose template names no tools."""

from __future__ import annotations

from ksana_jax.serve.server.tool_parsers.base import NAME, Form, ToolParser
from ksana_jax.serve.server.tool_parsers.hermes import END, START, read

SMOLLM = ToolParser(
    templates=("SmolLM",),
    starts=(START,),
    end=END,
    read=read,
    form=Form(f'{{"name": "{NAME}", "arguments": ', "}", ", ", f"{START}[", f"]{END}"),
)
