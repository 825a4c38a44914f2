"""Chat templates: formats messages as the model was trained on, in a Jinja sandbox."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeAlias

from ksana_jax.core import vllm_names
from ksana_jax.tokenizers.base import Tokenizer
from ksana_jax.tokenizers.files import one_line
from ksana_jax.tokenizers.messages import check_plain, check_tools, read_messages

# A conversation.
Messages: TypeAlias = Sequence[Mapping[str, Any]]

_CHAT_KEYWORDS = {"messages", "sampling_params", "use_tqdm", "chat_template", "chat_template_kwargs", "tools"}
_CHAT_KEYWORDS |= {"add_generation_prompt", "continue_final_message"}
# Marks the end of a message that is continued; a template that trims contents takes its last space.
_OPEN_END = "<|ksana: continues here|> "


class ChatTemplateError(ValueError):
    """A chat template rejected the messages, or did something that the sandbox forbids."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool | None = None,
    *,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    now: datetime.datetime | None = None,
) -> str:
    """Formats messages with a chat template, as transformers' `apply_chat_template`.

    Encode the result with `add_special_tokens=False`: the template writes BOS itself.

    Args:
      messages: {"role": ..., "content": text or [{"type": "text", "text": ...}]} in order; an assistant's message may
        have tool_calls, as in OpenAI's API.
      add_generation_prompt: end with the text that precedes the assistant's answer; None does so unless the final
        message is continued.
      continue_final_message: end with the last message, left open, so that the model continues it.
      tools: JSON objects that describe functions, for templates that show them to the model.
      chat_template: the name of one of the model's templates, or a Jinja text; None takes "tool_use", if there is one
        and tools are given, or else the default.
      chat_template_kwargs: additional names for the template, such as enable_thinking.
      now: current time for the template; None reads the clock.

    Raises:
      ValueError: an argument has another form, or the tokenizer has no such template.
      ChatTemplateError: the template rejected the messages or did something forbidden; the error text begins with
        "chat template refused".
    """
    from ksana_jax.tokenizers.template_sandbox import GLOBALS, render  # Jinja is slow to import, and only chats need it

    read, source = read_messages(messages), template_of(tokenizer, chat_template, tools)
    if tools is not None:
        check_tools(tools)
    if continue_final_message and add_generation_prompt:
        raise ValueError("add_generation_prompt begins a new message, continue_final_message continues the last one")
    for message in read:
        if message.get("content") is not None:
            continue
        # A template without support for calls would write None, or fail; gpt-oss's reads any content that is there.
        if "tool_calls" not in source:
            message["content"] = ""
        elif '"content" in message' in source:
            message.pop("content", None)
    if continue_final_message:
        read[-1]["content"] = (read[-1].get("content") or "") + _OPEN_END
    given = {
        "messages": read,
        "tools": tools or None,
        "add_generation_prompt": not continue_final_message if add_generation_prompt is None else add_generation_prompt,
    }
    more = {} if chat_template_kwargs is None else chat_template_kwargs
    _check_names(more, {*given, "bos_token", "eos_token", *GLOBALS})
    own = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    special = {name: text for name, text in own.items() if text} | dict(tokenizer.named_tokens)
    try:
        text = render(source, {"documents": None, **special, **given, **more}, now)
    except ValueError as error:
        raise ChatTemplateError(f"chat template refused: {one_line(error)}") from None
    return _cut(text) if continue_final_message else text


def template_of(tokenizer: Tokenizer, chat_template: str | None, tools: Any) -> str:
    """Returns the template that `render_chat` uses; raises ValueError if there is none."""
    named = tokenizer.chat_templates
    if chat_template is None:
        source = (named.get("tool_use") if tools else None) or tokenizer.chat_template
        if source is None:
            raise ValueError(tokenizer.no_template or f"{tokenizer.source} comes without a chat template")
        return source
    if isinstance(chat_template, str) and (chat_template in named or "{" in chat_template):
        return named.get(chat_template, chat_template)
    names = f"the name of one ({', '.join(named)}) or " if named else ""
    raise ValueError(f"chat_template is {one_line(repr(chat_template), 60)}, must be {names}a Jinja text")


def _check_names(given: Any, taken: Set[str]) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"chat_template_kwargs is {one_line(repr(given), 60)}, must be a dict")
    check_plain("chat_template_kwargs", given)
    if clash := sorted(taken & given.keys()):
        raise ValueError(f"chat_template_kwargs has {clash[0]!r}, which does not come from there")


def _cut(text: str) -> str:
    """Returns a text up to the end of its last message; raises ChatTemplateError if the template does not write it."""
    before, found, after = text.rpartition(_OPEN_END.rstrip())
    if not found:
        raise ChatTemplateError("chat template refused: it does not write the last message, which cannot be continued")
    # A template that trims contents has taken the space at the end, and would have taken the message's own.
    return before if after.startswith(" ") else before.rstrip()


def chat_prompts(
    messages: Messages | Sequence[Messages], tokenizer: Tokenizer | None, options: Mapping[str, Any], method: str
) -> list[dict[str, Any]]:
    """Returns conversations as prompts of text and token ids, formatted with the tokenizer's chat template.

    Args:
      messages: a conversation or a list of conversations, each a list of {"role": ..., "content": ...}.
      options: arguments of `render_chat`.
      method: that was called, for messages.

    Raises:
      ValueError: messages have another form, an option is unknown, or there is no template.
    """
    vllm_names.refuse_unknown(method, options, _CHAT_KEYWORDS)
    if tokenizer is None:
        raise ValueError("this model has no tokenizer, so no chat template")
    if not isinstance(messages, (list, tuple)):
        raise ValueError(f"messages is a {type(messages).__name__}, must be a list")
    one = bool(messages) and isinstance(messages[0], Mapping)
    conversations: Any = [messages] if one else messages
    texts = [render_chat(tokenizer, c, **options) for c in conversations]
    # A template writes the special tokens itself.
    return [{"prompt": t, "prompt_token_ids": tokenizer.encode(t, add_special_tokens=False)} for t in texts]
