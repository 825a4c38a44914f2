"""Renders chat templates in Jinja's immutable sandbox. Imports nothing of ksana_jax.

A template has as much trust as its model: the sandbox keeps it from Python's internals and bounds its output, not its
time.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Names in every template's scope, in addition to a request's.
GLOBALS = ("namespace", "cycler", "joiner", "dict", "range", "raise_exception", "strftime_now")
# Several times the longest published template; a longer one would take seconds to compile.
MAX_TEMPLATE_CHARS = 2**17
MAX_OUTPUT_CHARS = 2**20


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, which marks training targets and has no effect here."""

    tags = {"generation"}  # noqa: RUF012  declared by the base class, which Jinja reads

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The base class bounds `range`; this one also bounds how often `*` repeats, as clients may send the factor."""

    intercepted_binops = frozenset("*")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sequence, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(times, int) and isinstance(sequence, (str, list)) and len(sequence) * times > MAX_OUTPUT_CHARS:
            raise OverflowError(f"it repeats something to a length above {MAX_OUTPUT_CHARS:,}")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> _Environment:
    made = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
    made.globals = {name: made.globals[name] for name in GLOBALS if name in made.globals}
    made.globals["raise_exception"] = _raise_exception
    made.filters["tojson"] = _tojson
    return made


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ValueError(f"it has {len(source):,} characters; supported: at most {MAX_TEMPLATE_CHARS:,}")
    return _environment().from_string(source)


def render(source: str, given: Mapping[str, Any], now: datetime.datetime | None) -> str:
    """Renders a template.

    Args:
      given: names in its scope.
      now: time for `strftime_now`; None reads the clock.

    Raises:
      ValueError: the template is not valid or too long, raises anything, or its output is too long.
    """
    time = now or datetime.datetime.now()
    parts, length = [], 0
    try:
        for part in _compile(source).generate({**given, "strftime_now": time.strftime}):
            length += len(part)
            if length > MAX_OUTPUT_CHARS:
                raise ValueError(f"its output is longer than {MAX_OUTPUT_CHARS:,} characters")
            parts.append(part)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise ValueError("it calls itself without end") from None
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from None
    return "".join(parts)
