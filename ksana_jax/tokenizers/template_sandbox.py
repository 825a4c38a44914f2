"""A process that renders chat templates in Jinja's sandbox; the system kills it when one exceeds its limits.

A template can keep one C function busy for hours, or ask it for more memory than the machine has; only a limit of the
operating system stops that. `template_process` runs this file as a script: each line of JSON on stdin holds a template
and the names that it sees, each line on stdout its text or error. Imports nothing of ksana_jax.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Names in every template's scope, in addition to a request's.
GLOBALS = ("namespace", "cycler", "joiner", "dict", "range", "raise_exception", "strftime_now")
OUT_OF_MEMORY = 100  # exit status


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, which marks training targets and has no effect here."""

    tags = {"generation"}  # noqa: RUF012  declared by the base class, which Jinja reads

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    made.globals = {name: made.globals[name] for name in GLOBALS if name in made.globals}
    made.globals["raise_exception"] = _raise_exception
    made.filters["tojson"] = _tojson
    return made


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def render(source: str, given: Mapping[str, Any], now: str | None, most: int) -> str:
    """Renders a template.

    Args:
      now: time for `strftime_now`, in ISO format; None reads the clock.
      most: characters of output.

    Raises:
      ValueError: the output is longer. A template can also make Python raise anything.
    """
    time = datetime.datetime.now() if now is None else datetime.datetime.fromisoformat(now)
    parts, length = [], 0
    for part in _compile(source).generate({**given, "strftime_now": time.strftime}):
        length += len(part)
        if length > most:
            raise ValueError(f"its output is longer than {most:,} characters")
        parts.append(part)
    return "".join(parts)


def _answer(line: bytes) -> dict[str, str]:
    try:
        return {"text": render(**json.loads(line))}
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


def main(cpu_s: float, memory_bytes: int) -> None:
    """Answers requests until stdin ends. The process is killed when one of them takes more than cpu_s."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        for line in sys.stdin.buffer:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            answer = json.dumps(_answer(line))
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(answer, flush=True)
    except MemoryError:  # of any line of this loop; a new process starts without fragmented memory
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
