#!/usr/bin/env bash
# xgrammar 0.2.9: a JSON schema's `pattern` must match the whole string, even if it begins with ^ or ends in $.
#
# Guess: as JSON Schema says, "^x-" matches every string that begins with x-, and "a" every string that has an a.
# Seen: the string must be exactly "x-", or "a". The same holds for the keys of `patternProperties`: {"^x-": ...} allows
# the key "x-" and no longer one, also where other keys are allowed. llguidance keeps to the specification.
# Hurt: whoever constrains ids, paths or dates by a prefix: the model can write the prefix and nothing after it, and the
# answer is valid, so no check shows it.
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


keys = {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}}
seen = []
for schema, text in (
    ({"type": "string", "pattern": "^x-"}, '"x-"'),
    ({"type": "string", "pattern": "^x-"}, '"x-7"'),
    ({"type": "string", "pattern": "a"}, '"a"'),
    ({"type": "string", "pattern": "a"}, '"bar"'),
    (keys, '{"x-":1}'),
    (keys, '{"x-7":1}'),
):
    assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    seen.append((by_xgrammar(schema, text), by_llguidance(schema, text)))
    what = schema.get("pattern") or "patternProperties ^x-"
    print(f"{what:22} {text:10} valid: True  xgrammar accepts: {seen[-1][0]!s:5}  llguidance accepts: {seen[-1][1]}")
assert seen == [(True, True), (False, True)] * 3, "the behaviour has changed"
END
