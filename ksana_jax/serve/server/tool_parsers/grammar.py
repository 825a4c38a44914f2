"""Grammars of tool calls, in llguidance's Lark, whose arguments follow JSON Schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ksana_jax.sampling.grammar import WHITESPACE
from ksana_jax.serve.server.tool_parsers.base import NAME, Form, ToolParser

_ANY = {"type": "object"}


class Schema(NamedTuple):
    """The arguments of a function; parameters: their JSON Schema, None for any object."""

    name: str
    parameters: dict[str, Any] | None


def call_grammar(
    parser: ToolParser,
    form: Form,
    schemas: Sequence[Schema],
    special: Mapping[str, int],
    *,
    required: bool,
    several: bool,
) -> str:
    """Returns the grammar of an answer.

    Args:
      form: of the calls. special: ids of the tokens that a text does not spell, by what they stand for.
      required: the answer is a call; if not, it is text and calls in any order, or either if calls begin an answer.
      several: whether more calls may follow the first one.
    """

    def text(literal: str) -> str:
        pieces = [literal]
        if special:
            pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", literal)
        spelled = (f"<[{special[p]}]>" if p in special else json.dumps(p, ensure_ascii=False) for p in pieces if p)
        return " ".join(spelled) or '""'

    trigger = parser.starts[0]
    tagged = not required and parser.anywhere
    begin, before = form.begin, form.before
    if tagged and before:
        before = before.removeprefix(trigger)
    elif tagged:
        begin = begin.removeprefix(trigger)
    more = f"({text(form.between)} call)*" if several and (before or form.before or not tagged) else ""
    rules = [
        f"calls: {text(before)} call {more} {text(form.after)}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(schemas))),
        "TEXT: /(.|\\n)*/",
    ]
    for number, schema in enumerate(schemas):
        given = schema.parameters or _ANY
        # A function takes no other arguments than those it names.
        closed = {"additionalProperties": False} if "properties" in given else {}
        arguments = {**closed, **given, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        first, last = text(begin.replace(NAME, schema.name)), text(form.end)
        rules.append(f"call_{number}: {first} %json {json.dumps(arguments)} {last}")
    if required:
        return "\n".join(["start: calls", *rules])
    if not tagged:
        marks = "".join({re.escape(one[0]) for one in parser.starts})
        return "\n".join(["start: calls | FREE", f"FREE: /([^{marks}](.|\\n)*)?/", *rules])
    lead = f"lead: TEXT {text(trigger)}" if trigger in special else f"lead[lazy]: TEXT {text(trigger)}"
    return "\n".join([f"start: (lead calls){'*' if several else '?'} TEXT", lead, *rules])
