#!/usr/bin/env bash
# llguidance 1.9.1: a grammar of `format: date` allows 29 February in every year, and of `time` any minute's leap second.
#
# Guess: as 30 February and 31 April are refused, 29 February is allowed in leap years alone, and 60 seconds only at
# 23:59:60 UTC, as RFC 3339 (section 5.7) and the test suite of JSON Schema have it.
# Seen: "2023-02-29" and "10:00:60Z" are allowed, in date-time too; "2023-02-30" and "10:00:61Z" are not.
# Hurt: whoever trusts a constrained answer and parses it: datetime.date.fromisoformat("2023-02-29") raises.
# Versions: Python 3.11, llguidance 1.9.1. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q llguidance==1.9.1
"$folder/venv/bin/python" - <<'END'
import json

import llguidance

BYTES = llguidance.LLTokenizer("byte")


def allowed(kind, text):
    schema = json.dumps({"type": "string", "format": kind})
    matcher = llguidance.LLMatcher(BYTES, llguidance.LLMatcher.grammar_from_json_schema(schema))
    tokens = BYTES.tokenize_str(json.dumps(text))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


expected = {
    ("date", "2024-02-29"): True,
    ("date", "2023-02-29"): True,
    ("date", "2023-02-30"): False,
    ("date", "2023-04-31"): False,
    ("time", "23:59:60Z"): True,
    ("time", "10:00:60Z"): True,
    ("time", "10:00:61Z"): False,
    ("date-time", "2023-02-29T10:00:60Z"): True,
}
found = {case: allowed(*case) for case in expected}
for (kind, text), seen in found.items():
    print(f"{kind:10} {text:22} {'allowed' if seen else 'refused'}")
assert found == expected, "the behaviour has changed"
END
