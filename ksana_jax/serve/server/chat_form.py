"""The form of a chat's answers: reasoning, text, calls of the tools that the request offers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ksana_jax.core.request import SamplingParams
from ksana_jax.core.structured_outputs import StructuredOutputsParams
from ksana_jax.serve.server.answer_parts import AnswerParts, message_of, thinking_tags
from ksana_jax.serve.server.errors import bad_request
from ksana_jax.serve.server.message_models import NamedTool
from ksana_jax.serve.server.model import ServedModel
from ksana_jax.serve.server.prompts import PromptIds
from ksana_jax.serve.server.request_models import ChatRequest
from ksana_jax.serve.server.tool_parsers.base import ToolParser
from ksana_jax.serve.server.tool_parsers.grammar import Schema, call_grammar
from ksana_jax.serve.server.tool_parsers.llama import LLAMA
from ksana_jax.serve.server.tool_parsers.registry import PARSERS, parser_for
from ksana_jax.tokenizers.chat import template_of


@dataclasses.dataclass(frozen=True)
class ChatForm:
    """The parts that the answers to a request can have, and the grammar that its tools ask for.

    Attributes:
      thinking, parser, tools, several: as `AnswerParts` takes them.
      grammar: None if any text may come.
      shows_special: whether the text needs its special tokens, since tags or calls are written with some.
    """

    thinking: tuple[str, str] | None = None
    parser: ToolParser | None = None
    tools: Mapping[str, Mapping[str, Any] | None] | None = None
    several: bool = True
    grammar: str | None = None
    shows_special: bool = False

    def parts(self) -> AnswerParts | None:
        """Returns what divides one answer; None if all of it is text."""
        if self.thinking is None and self.parser is None:
            return None
        return AnswerParts(self.thinking, self.parser, self.tools, self.several)

    def message(self, text: str) -> dict[str, Any]:
        """Returns a whole answer as a message."""
        parts = self.parts()
        return {"role": "assistant", "content": text} if parts is None else message_of(parts.feed(text, last=True))

    def applied(self, params: SamplingParams) -> SamplingParams:
        """Returns sampling parameters for such answers: what text must follow begins after the reasoning."""
        structured = params.structured_outputs
        if self.grammar is not None:
            structured = StructuredOutputsParams(grammar=self.grammar)
        if structured is not None and structured.thinking is None:
            thinking = self.thinking
            if thinking is not None and self.parser is not None and self.parser.channels:
                begin, end = thinking
                header = self.parser.channels if self.grammar is None else ""
                thinking = begin, f"{end}<|start|>assistant{header}"
            structured = dataclasses.replace(structured, thinking=thinking)
        skips = params.skip_special_tokens and not self.shows_special
        return dataclasses.replace(params, structured_outputs=structured, skip_special_tokens=skips)


def chat_form(model: ServedModel, asked: ChatRequest, prompt: PromptIds, parser_name: str | None) -> ChatForm:
    """Returns the form of the answers to a request.

    Args:
      parser_name: of `PARSERS`; None chooses by the chat template.

    Raises:
      APIError: status 400: a tool is strict, and calls have no grammar.
    """
    template = "" if model.tokenizer is None else template_of(model.tokenizer, None, asked.tools)
    thinking, special = thinking_tags(template, prompt.text or ""), model.special_ids
    shown = thinking is not None and not special.keys().isdisjoint(thinking)
    parser, forced = PARSERS[parser_name] if parser_name else parser_for(template), asked.forces_call
    if not (tools := asked.functions):
        return ChatForm(thinking, parser if parser.channels else None, shows_special=shown or bool(parser.channels))
    several, grammar = asked.parallel_tool_calls is not False, None
    if forced or any(tool.strict for tool in tools):
        if (parser.form is None or parser.channels) and not forced:
            raise bad_request("tools has strict, which needs tool_choice required with calls of this model", "tools")
        # Calls that are not JSON are forced in the form of Llama's.
        parser = parser if parser.form else LLAMA
        assert parser.form is not None
        schemas = [Schema(tool.name, tool.enforced(forced)) for tool in tools]
        more = several and not isinstance(asked.tool_choice, NamedTool)
        grammar = call_grammar(parser, parser.form, schemas, special, required=forced, several=more)
    marks = "".join((*parser.starts, *(parser.form or ())))
    shown = shown or any(token in marks for token in special)
    return ChatForm(thinking, parser, {tool.name: tool.parameters for tool in tools}, several, grammar, shown)
