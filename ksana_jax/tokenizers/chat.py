"""Chat templates: formats messages as the model was trained on, in a Jinja sandbox.

A template is code that comes with a model. `template_sandbox` keeps it from Python's internals and limits its work to
about a second and 100 MB, whether it is faulty or malicious.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from ksana_jax.tokenizers import template_budget
from ksana_jax.tokenizers.base import Tokenizer
from ksana_jax.tokenizers.files import one_line
from ksana_jax.tokenizers.template_sandbox import counted_range, environment, strftime

# Several times the longest published template; a longer one would take seconds to compile.
MAX_TEMPLATE_CHARS = 2**17
MAX_OUTPUT_CHARS = 2**20


class ChatTemplateError(ValueError):
    """A chat template rejected the messages, or did something that the sandbox forbids."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool = True,
    *,
    now: datetime.datetime | None = None,
    **variables: Any,
) -> str:
    """Formats messages with the model's chat template.

    Encode the result with `add_special_tokens=False`: the template writes BOS itself.

    Args:
      messages: {"role": ..., "content": ...} in order; other keys must be strings and are passed to the template.
      add_generation_prompt: end with the text that precedes the assistant's answer.
      now: current time for the template; None reads the clock.
      variables: additional names for the template, such as enable_thinking.

    Raises:
      ValueError: messages have another form, or the tokenizer has no chat template.
      ChatTemplateError: the template rejected the messages or did something forbidden; the error text begins with
        "chat template refused".
    """
    _check_messages(messages)
    if tokenizer.chat_template is None:
        raise ValueError(tokenizer.no_template or f"{tokenizer.source} comes without a chat template")
    given = {
        "messages": [dict(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "strftime_now": lambda form: strftime(now or datetime.datetime.now(), form),
        "range": counted_range,
        **variables,
    }
    budget = template_budget.start()
    try:
        parts, length = [], 0
        for part in _compile(tokenizer.chat_template).generate(given):
            length += len(part)
            if length > MAX_OUTPUT_CHARS:
                raise SecurityError(f"its output is longer than {MAX_OUTPUT_CHARS:,} characters")
            parts.append(part)
        return "".join(parts)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"chat template refused: line {error.lineno}: {one_line(error.message)}") from None
    except RecursionError:
        raise ChatTemplateError("chat template refused: it calls itself without end") from None
    except Exception as error:  # a template can make Python raise anything: division by zero, a missing key
        raise ChatTemplateError(f"chat template refused: {one_line(error) or type(error).__name__}") from None
    finally:
        template_budget.end(budget)


def _check_messages(messages: Any) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages is {one_line(repr(messages), 60)}, must be a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{index}] is {type(message).__name__}, must be a dict with role and content")
        for key in ("role", "content"):
            if key not in message:
                raise ValueError(f"messages[{index}] has no {key}")
        for key, value in message.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise ValueError(f"messages[{index}] {key!r:.60} is {type(value).__name__}, must be a string")


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise SecurityError(f"it has {len(source):,} characters; supported: at most {MAX_TEMPLATE_CHARS:,}")
    return environment().from_string(source)
