#!/usr/bin/env bash
# xgrammar 0.2.9: two valid JSON schemas compile to grammars that accept only invalid answers.
#
# Guess: an engine for grammars enforces a keyword, or refuses the schema, or ignores the keyword and allows more.
# Seen: a key that is in `required` but not in `properties` is forbidden: {"required": ["a", "b"], "properties": {"a": ...}}
# accepts {"a":1} and not {"a":1,"b":2}. Next to `anyOf`, `properties` and `required` are dropped: the answer must be one
# of the alternatives alone, without the common keys. Nothing is logged. llguidance accepts the valid answers only.
# Hurt: whoever lists common keys once and variants in `anyOf`, as tool calls and events do: every answer parses, and
# every answer fails validation.
# Versions: Python 3.11, xgrammar 0.2.9, llguidance 1.9.1, jsonschema 4.26.0. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q xgrammar==0.2.9 llguidance==1.9.1 jsonschema==4.26.0
"$folder/venv/bin/python" - <<'END'
import json
from importlib.metadata import version

import jsonschema
import llguidance
import xgrammar

print(*(f"{name} {version(name)}" for name in ("xgrammar", "llguidance", "jsonschema")), sep=", ")
tokens = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + [b"<end>"], vocab_size=257, stop_token_ids=[256])
compiler = xgrammar.GrammarCompiler(tokens)
bytewise = llguidance.LLTokenizer("byte")


def by_xgrammar(schema, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return matcher.accept_string(text) and matcher.accept_token(256)


def by_llguidance(schema, text):
    matcher = llguidance.LLMatcher(bytewise, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    ids = bytewise.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


number = {"type": "integer"}
undeclared = {"type": "object", "properties": {"a": number}, "required": ["a", "b"]}
variants = [{"type": "object", "properties": {key: number}, "required": [key]} for key in ("b", "c")]
common = {"type": "object", "properties": {"a": number}, "required": ["a"], "anyOf": variants}
for schema, valid, invalid in ((undeclared, '{"a":1,"b":2}', '{"a":1}'), (common, '{"a":1,"b":1}', '{"b":1}')):
    print(json.dumps(schema))
    for text, is_valid in ((valid, True), (invalid, False)):
        found = by_xgrammar(schema, text), by_llguidance(schema, text)
        print(f"  {text:15} valid: {is_valid!s:5}  xgrammar accepts: {found[0]!s:5}  llguidance accepts: {found[1]}")
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)) == is_valid
        assert found == (not is_valid, is_valid), "the behaviour has changed"
END
