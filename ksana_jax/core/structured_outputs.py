"""Constraints on the text of an output: a JSON Schema, a regular expression, a grammar. Independent of tokenizers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ksana_jax.core import checks

# Characters of a grammar: it is compiled before its request is queued.
MAX_GRAMMAR_CHARS = 2**17
MAX_CHOICES = 4096
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Constraint on the text of an output: one of the first six fields. Names and meanings as in vLLM.

    Args:
      json: a JSON Schema as a dict or a text, or a Pydantic model, whose schema is taken.
      regex: a regular expression that the whole text matches, without look-around.
      choice: texts, of which the output is one.
      grammar: a grammar in the notation of Lark or of llama.cpp (GBNF).
      json_object: True for any JSON object.
      structural_tag: free text in which each "begin" starts a part that follows a schema up to "end":
        {"structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]}, as a dict or a text. Each
        "begin" starts with a trigger.
      disable_any_whitespace: no white space between the tokens of JSON.
      whitespace_pattern: regular expression of the white space between them; None allows up to 32 spaces, tabs and
        line ends.
      thinking: tags around reasoning that may stand before the constrained text, such as ("<think>", "</think>"); the
        first is empty if the prompt ends with it.

    Raises:
      ValueError: none or several of the first six are given, or one is not of its type.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    thinking: tuple[str, str] | list[str] | None = None

    def __post_init__(self):
        checks.require(
            checks.boolean("structured_outputs.disable_any_whitespace", self.disable_any_whitespace),
            *(_text(name, getattr(self, name)) for name in ("regex", "grammar", "whitespace_pattern")),
        )
        if self.json_object not in (None, True):
            raise ValueError(f"structured_outputs.json_object is {self.json_object!r:.60}, must be True or None")
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"structured_outputs has {' and '.join(given) or 'none'} of {', '.join(_KINDS)}; give one")
        if self.thinking is not None:
            object.__setattr__(self, "thinking", _tags(self.thinking))
        # As text, so that later changes of a dict change nothing, and equal ones are compiled once.
        for name in ("json", "structural_tag"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _as_json(name, value))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if (
            size := max(len(text) for text in (*map(str, self.source), self.whitespace_pattern or ""))
        ) > MAX_GRAMMAR_CHARS:
            raise ValueError(
                f"structured_outputs.{self.kind} has {size:,} characters, at most {MAX_GRAMMAR_CHARS:,} are compiled"
            )

    @property
    def kind(self) -> str:
        """Returns the name of the field that is given."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def source(self) -> tuple[str, ...]:
        """Returns what is compiled: the field's text, or the choices."""
        value = getattr(self, self.kind)
        return value if isinstance(value, tuple) else (str(value),)


def read(given: Any) -> StructuredOutputsParams:
    """Returns the value of `SamplingParams.structured_outputs`, which may be a dict.

    Raises:
      ValueError: it is neither, or a field is wrong.
    """
    if isinstance(given, StructuredOutputsParams):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"structured_outputs is {given!r:.60}, must be a StructuredOutputsParams")
    fields = {field.name for field in dataclasses.fields(StructuredOutputsParams)}
    if unknown := sorted(str(name) for name in given if name not in fields):
        raise ValueError(f"structured_outputs has unknown fields {', '.join(unknown):.80}")
    return StructuredOutputsParams(**given)


def _text(name: str, value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return None
    return f"structured_outputs.{name} is {checks.shown(value)}, must be a text"


def _as_json(name: str, value: Any) -> str:
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        if not isinstance(parsed, dict):
            raise ValueError("it is not an object")
        return json.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.{name} is {value!r:.60}, must be JSON: {error}") from None


def _tags(given: Any) -> tuple[str, ...]:
    if not isinstance(given, (list, tuple)) or [type(tag) for tag in given] != [str, str] or not given[1]:
        raise ValueError(f"structured_outputs.thinking is {given!r:.60}, must be two tags, the second one not empty")
    return tuple(given)


def _choices(given: Any) -> tuple[str, ...]:
    if not isinstance(given, (list, tuple)) or not 1 <= len(given) <= MAX_CHOICES:
        raise ValueError(f"structured_outputs.choice is {given!r:.60}, must be a list of 1 to {MAX_CHOICES:,} texts")
    for text in given:
        if not isinstance(text, str) or not text:
            raise ValueError(f"structured_outputs.choice has {text!r:.60}, each must be a text that is not empty")
    return tuple(given)
