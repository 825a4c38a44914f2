"""JSON Schema as llguidance enforces or refuses it, which docs/use/serving.md lists; and masks under jit."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from ksana_jax import StructuredOutputsParams
from ksana_jax.sampling.grammar import Grammars
from ksana_jax.sampling.masks import masked
from ksana_jax.tokenizers import Tokenizer
from ksana_jax.tokenizers.base import Piece

PAGE = (Path(__file__).parents[2] / "docs/use/serving.md").read_text(encoding="utf-8")
INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def an_object(**properties):
    return {"type": "object", "properties": properties}


# Keyword: a schema, texts that it allows, and others.
ENFORCED = {
    "type": ({"type": ["integer", "null"]}, ["1", "null", "-5"], ['"a"', "1.5"]),
    "enum": ({"enum": ["a", 1, None, {"x": 1}]}, ['"a"', "1", "null", '{"x":1}'], ['"b"', "2"]),
    "const": ({"const": [1, 2]}, ["[1,2]", "[1, 2]"], ["[1]"]),
    "properties": (an_object(a=INTEGER), ['{"a":1}', "{}", '{"b":[2]}'], ['{"a":"x"}']),
    "required": (an_object(a={}, b={}) | {"required": ["b"]}, ['{"b":1}', '{"a":0,"b":1}'], ['{"a":1}', "{}"]),
    "additionalProperties": (an_object(a={}) | {"additionalProperties": False}, ['{"a":1}'], ['{"b":1}']),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^a": INTEGER}, "additionalProperties": False},
        ['{"ab":1}'],
        ['{"b":1}', '{"ab":"x"}'],
    ),
    "minProperties": ({"type": "object", "minProperties": 2}, ['{"a":1,"b":2}'], ['{"a":1}']),
    "maxProperties": ({"type": "object", "maxProperties": 1}, ['{"a":1}'], ['{"a":1,"b":2}']),
    "items": ({"type": "array", "items": INTEGER}, ["[1,2]", "[]"], ['["a"]']),
    "prefixItems": ({"type": "array", "prefixItems": [INTEGER, STRING], "items": False}, ['[1,"a"]'], ['[1,"a",2]']),
    "minItems": ({"type": "array", "minItems": 2}, ["[1,2]"], ["[1]"]),
    "maxItems": ({"type": "array", "maxItems": 1}, ["[1]", "[]"], ["[1,2]"]),
    "minLength": (STRING | {"minLength": 2}, ['"ab"', '"é\\n"'], ['"a"']),
    "maxLength": (STRING | {"maxLength": 2}, ['"ab"'], ['"abc"']),
    "pattern": (STRING | {"pattern": "b"}, ['"abc"', '"b"'], ['"acd"']),
    "format": (STRING | {"format": "date"}, ['"2026-11-29"'], ['"29.11.2026"', '"2026-13-01"']),
    "minimum": (INTEGER | {"minimum": 5}, ["5", "17"], ["4", "-9"]),
    "maximum": ({"type": "number", "maximum": 5}, ["4.5", "-17"], ["5.5"]),
    "exclusiveMinimum": (INTEGER | {"exclusiveMinimum": 5}, ["6"], ["5"]),
    "exclusiveMaximum": (INTEGER | {"exclusiveMaximum": 5}, ["4"], ["5"]),
    "multipleOf": (INTEGER | {"multipleOf": 5}, ["5", "10"], ["6"]),
    "anyOf": ({"anyOf": [INTEGER, STRING]}, ["1", '"a"'], ["null"]),
    "allOf": ({"allOf": [an_object(a=INTEGER), {"required": ["a"]}]}, ['{"a":1}'], ["{}"]),
    "oneOf": ({"oneOf": [INTEGER, STRING]}, ["1", '"a"'], ["null"]),
    "$ref": ({"$defs": {"n": INTEGER}, "type": "array", "items": {"$ref": "#/$defs/n"}}, ["[1]"], ['["a"]']),
}
# Schemas and texts that these forbid and outputs may be.
LAX = {"date": (STRING | {"format": "date"}, '"2026-02-29"'), "time": (STRING | {"format": "time"}, '"08:00:60Z"')}
# Texts that schemas allow and no output is.
NEVER = {
    "another order": (an_object(a={}, b={}), '{"b":1,"a":1}'),
    "\\u00e9": (STRING, '"\\u00e9"'),
    "1.0": (INTEGER, "1.0"),
    "exponents": ({"type": "number", "minimum": 0}, "1e5"),
}
REFUSED = {
    "not": {"not": {}},
    "if": {"if": {}, "then": {}},
    "contains": {"contains": {}},
    "uniqueItems": {"uniqueItems": True},
    "propertyNames": {"propertyNames": {}},
    "dependentRequired": {"dependentRequired": {}},
    "dependentSchemas": {"dependentSchemas": {}},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "unevaluatedItems": {"unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "oneOf": {"oneOf": [INTEGER, {"type": "number"}]},
    "uri-reference": STRING | {"format": "uri-reference"},
}
IGNORED = {"nullable": STRING | {"nullable": True}}
FORMATS = "date-time time date duration email hostname ipv4 ipv6 uuid uri"


class Bytes(Tokenizer):
    """A token for each byte, and EOS."""

    source, vocab_size, eos_id = "bytes", 257, 256

    def piece(self, token_id: int) -> Piece:
        return Piece(bytes([token_id])) if token_id < 256 else Piece(b"<end>", special=True)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [*text.encode()]


GRAMMARS = Grammars(Bytes(), 257, [256])


def allows(schema, text: str) -> bool:
    """Whether each byte of a text and its end is allowed after those before."""
    matcher, mask, ids = (
        GRAMMARS.matcher(StructuredOutputsParams(json=schema)),
        np.zeros(9, np.uint32),
        [*text.encode(), 256],
    )
    for at, token in enumerate(ids):
        matcher.follow(np.array(ids[:at], np.int32))
        matcher.allow(mask.view(np.int32), ())
        if not mask[token // 32] >> (token % 32) & 1:
            return False
    return True


@pytest.mark.parametrize("keyword", ENFORCED)
def test_a_keyword_is_enforced(keyword):
    schema, valid, invalid = ENFORCED[keyword]
    assert [text for text in valid if not allows(schema, text)] == []
    assert [text for text in invalid if allows(schema, text)] == []


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_is_refused_by_name(keyword):
    with pytest.raises(ValueError, match=re.escape(keyword)):
        GRAMMARS.matcher(StructuredOutputsParams(json=REFUSED[keyword]))


@pytest.mark.parametrize("name", NEVER)
def test_some_valid_texts_are_never_written(name):
    assert not allows(*NEVER[name])


@pytest.mark.parametrize("name", LAX)
def test_some_formats_are_laxer_than_the_standard(name):
    assert allows(*LAX[name])


def test_some_keywords_are_ignored_and_formats_are_known():
    assert not allows(IGNORED["nullable"], "null") and allows(IGNORED["nullable"], '"a"')
    for name in FORMATS.split():
        GRAMMARS.matcher(StructuredOutputsParams(json=STRING | {"format": name}))


def test_the_page_lists_what_is_measured_here():
    rows = {line.split("|")[1].strip(): line for line in PAGE.splitlines() if line.count("|") == 3}
    covered = re.compile(
        r"min[A-Z]\w+|max[A-Z]\w+|minimum|maximum|exclusive\w+|dependent\w+|unevaluated\w+|uri-reference"
    )
    for row, names in {"enforced": ENFORCED, "refused by name": REFUSED.keys() - {"oneOf"}, "ignored": IGNORED}.items():
        assert not [name for name in names if not covered.fullmatch(name) and f"`{name}`" not in rows[row]], row
    assert all(f"`{name}`" in rows["enforced"] for name in FORMATS.split())
    assert all(name in rows["never written"] for name in NEVER)
    assert all(f"`{name}`" in rows["laxer than the standard"] for name in LAX)


def test_a_mask_forbids_single_tokens_of_single_rows():
    scores = np.random.default_rng(0).normal(size=(3, 70)).astype(np.float32)
    allowed = np.random.default_rng(1).random((3, 70)) < 0.5
    allowed[1] = True
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, 26))), axis=1, bitorder="little").view(np.int32)
    found = np.asarray(jax.jit(masked)(scores, bits))
    assert (found == np.where(allowed, scores, -np.inf)).all()
