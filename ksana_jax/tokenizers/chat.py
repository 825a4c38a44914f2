"""Chat templates: messages to the text that a model was trained on, through a Jinja sandbox.

A template is code that comes with a model. The sandbox keeps it from Python's internals and from changing what it is
given, and the limits here stop what would run or grow without end by mistake or by plain malice. They are no quota of
memory or time: a template that is built to waste both still can.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ksana_jax.tokenizers.base import Tokenizer
from ksana_jax.tokenizers.files import one_line

MAX_TEMPLATE_CHARS = 2**20
MAX_OUTPUT_CHARS = 2**20
MAX_RANGE_STEPS = 100_000
# Numbers that methods and filters may be given: str.ljust, indent and the like allocate such a width at once.
MAX_ARGUMENT = 2**20
_KEPT_GLOBALS = ("namespace", "cycler", "joiner")


class ChatTemplateError(ValueError):
    """A chat template that does not take these messages, or that asks for what it may not have."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool = True,
    *,
    now: datetime.datetime | None = None,
    **variables: Any,
) -> str:
    """Lays messages out as the model's chat template wants them.

    Encode the result with `add_special_tokens=False`: the template writes BOS itself.

    Args:
      messages: {"role": ..., "content": ...} in order; other keys go to the template as they are, as strings.
      add_generation_prompt: end with what precedes the assistant's answer.
      now: what the template takes for the time; by default the clock's.
      variables: further names for the template, such as enable_thinking.

    Raises:
      ValueError: messages of another form, or a tokenizer without a chat template.
      ChatTemplateError: the template refuses the messages, or does what it may not; the message begins with
        "chat template refused".
    """
    _check_messages(messages)
    if tokenizer.chat_template is None:
        raise ValueError(f"{tokenizer.source} comes without a chat template")
    budget = _Budget()
    given = {
        "messages": [dict(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "strftime_now": lambda form: (now or datetime.datetime.now()).strftime(_checked_format(form)),
        "range": budget.range,
        **variables,
    }
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


class _Budget:
    """Steps of all ranges of one rendering together, so that nested loops count as what they are."""

    def __init__(self):
        self._left = MAX_RANGE_STEPS

    def range(self, *args: int) -> range:
        steps = range(*args)
        self._left -= len(steps)
        if self._left < 0:
            raise SecurityError(f"its ranges have more than {MAX_RANGE_STEPS:,} steps")
        return steps


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks what an assistant said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with limits on single operations that would allocate without measure."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sized = [value for value in (left, right) if isinstance(value, (str, bytes, list, tuple))]
        if operator == "+" and sum(map(len, sized)) > MAX_OUTPUT_CHARS:
            raise SecurityError(f"it joins more than {MAX_OUTPUT_CHARS:,} characters")
        if operator == "*" and sized and any(isinstance(n, int) and n * len(s) > MAX_OUTPUT_CHARS
                                             for s in sized for n in (left, right)):  # fmt: skip
            raise SecurityError(f"it repeats to more than {MAX_OUTPUT_CHARS:,} characters")
        if operator == "%" and isinstance(left, str):
            _checked_format(left, percent=True)
        if operator == "**" and not (isinstance(left, (int, float)) and abs(right) <= 64 and abs(left) <= MAX_ARGUMENT):
            raise SecurityError("its powers are too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)  # None for what only keeps its arguments: namespace, dict, macros
        if owner is not None:
            _check_numbers(getattr(obj, "__name__", "a method"), (*args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's stand-in for str.format, which looks at the widths before it formats."""
        stand_in = super().wrap_str_format(value)
        if stand_in is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _checked_format(value.__self__)
            _check_numbers("format", (*args, *kwargs.values()))
            return stand_in(*args, **kwargs)

        return checked


def _check_numbers(name: str, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_ARGUMENT:
            raise SecurityError(f"it calls {name} with {one_line(value, 30)}")


def _checked_format(form: str, percent: bool = False) -> str:
    if re.search(r"\d{5}", form) or (percent and "*" in form):
        raise SecurityError(f"it formats with {form!r:.40}, a width of 10,000 or more")
    return form


def _with_checks(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # also takes over what Jinja notes on a filter's function
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(name, (*args[1:], *kwargs.values()))
        if name == "format":
            _checked_format(str(args[0]), percent=True)
        return function(*args, **kwargs)

    return checked


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation], autoescape=False
    )
    environment.globals = {name: environment.globals[name] for name in _KEPT_GLOBALS}
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    filters = {**environment.filters, "tojson": _tojson}
    environment.filters = {name: _with_checks(name, function) for name, function in filters.items()}
    return environment


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise SecurityError(f"it has {len(source):,} characters; supported: at most {MAX_TEMPLATE_CHARS:,}")
    return _environment().from_string(source)
