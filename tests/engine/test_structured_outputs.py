"""Outputs keep to their grammars: whatever the model, the speculation, the number of completions and the pool."""

import asyncio
import json
import re
import sys
import threading
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest

from ksana_jax import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from ksana_jax.core.sources import model_path
from ksana_jax.sampling import grammar
from ksana_jax.tokenizers import load_tokenizer
from ksana_jax.tokenizers.base import SpecialTokens
from ksana_jax.tokenizers.sentencepiece_model import SentencePieceTokenizer
from ksana_jax.tokenizers.tokenizer_json import JsonTokenizer
from tests.engine.small import Letters, assert_idle, make_llm, tokens_of


def bounded(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMAS = [
    bounded(name={"type": "string", "maxLength": 8}, age={"type": "integer", "minimum": 0, "maximum": 120}),
    bounded(tags={"type": "array", "items": {"enum": ["red", 7, None, "é"]}, "minItems": 1, "maxItems": 3}),
    bounded(at={"type": "string", "format": "date"}, code={"type": "string", "pattern": "^[A-Z]{2}[0-9]{1,3}$"}),
    bounded(either={"anyOf": [{"type": "boolean"}, bounded(x={"const": "y"})]}, none={"type": "null"}),
    {"$defs": {"leaf": bounded(n={"type": "integer", "minimum": -9, "maximum": 9})}, "$ref": "#/$defs/leaf"},
]
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
TREES = {"speculative_config": {"method": "trie", "num_speculative_tokens": 4, "decoding_mode": "hier"}}
BLOCK = {"speculative_config": {"method": "trie", "num_speculative_tokens": 4, "acceptance": "block"}}
GRAMMAR = {"speculative_config": {"method": "grammar", "num_speculative_tokens": 8}}
SHARED = {"enable_prefix_caching": True, "num_blocks": 8, **NGRAM}
PROMPT = "import json\nprint(json.dumps("


def tiny(**settings) -> LLM:
    folder = model_path("ksana-tiny")
    return make_llm(load_tokenizer(folder), folder=folder, **({"max_model_len": 128} | settings))


def asked(schema=None, **given) -> SamplingParams:
    """Random tokens: at this temperature the model's scores hardly matter."""
    structured = StructuredOutputsParams(json=schema, disable_any_whitespace=True) if schema else None
    defaults = {"temperature": 100.0, "max_tokens": 100, "structured_outputs": structured}
    return SamplingParams(**(defaults | given))


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("settings", [{}, NGRAM, GRAMMAR, TREES, BLOCK, {"num_blocks": 8}, SHARED])
def test_every_text_of_a_random_model_is_valid(settings, n):
    llm = tiny(**settings)
    params = [asked(SCHEMAS[seed % len(SCHEMAS)], n=n, seed=seed) for seed in range(100 // n)]
    # Four rows of long prompts do not fit into eight blocks.
    outputs = llm.generate([PROMPT * (4 if "num_blocks" in settings else 1)] * len(params), params)
    found = [(i, c) for i, output in enumerate(outputs) for c in output.outputs]
    for i, completion in found:
        assert completion.finish_reason == "stop", completion
        jsonschema_rs.validate(SCHEMAS[i % len(SCHEMAS)], json.loads(completion.text))
    assert len(found) == 100 and len({completion.text for _, completion in found}) > 50
    assert bool(llm.engine.scheduler.num_preemptions) == ("num_blocks" in settings) or settings == SHARED
    assert_idle(llm)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("settings", [NGRAM, GRAMMAR, *(pytest.param(s, marks=pytest.mark.soak) for s in ({}, BLOCK))])
def test_every_text_after_reasoning_is_valid(settings, n):
    # An end that any text soon has, within tokens too.
    params = []
    for seed in range(100 // n):
        given = {"json": SCHEMAS[seed % len(SCHEMAS)], "disable_any_whitespace": True, "thinking": ("", "e")}
        params.append(asked(None, n=n, seed=seed, structured_outputs=given))
    outputs = tiny(**settings).generate([PROMPT] * len(params), params)
    found = [(i, *c.text.partition("e")) for i, output in enumerate(outputs) for c in output.outputs]
    for i, _, _, text in found:
        jsonschema_rs.validate(SCHEMAS[i % len(SCHEMAS)], json.loads(text))
    assert len(found) == 100 and len({before for _, before, _, _ in found}) > 50


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_and_preemption_change_no_token(temperature):
    params = [asked(schema, temperature=temperature, seed=3) for schema in SCHEMAS]
    prompts = [load_tokenizer("ksana-tiny").encode(PROMPT * 4)] * len(params)
    plain = tokens_of(tiny(), prompts, params)
    assert tokens_of(tiny(num_blocks=8), prompts, params) == plain
    assert tokens_of(tiny(**NGRAM), prompts, params) == plain
    assert tokens_of(tiny(**GRAMMAR), prompts, params) == plain
    assert tokens_of(tiny(async_scheduling=False, num_scheduler_steps=4), prompts, params) == plain


def test_other_rows_of_a_batch_keep_their_tokens_and_scores():
    free = [asked(temperature=t, seed=i, logprobs=3, max_tokens=24) for i, t in enumerate((0.0, 1.0))]
    alone = tiny().generate([PROMPT] * 2, free)
    mixed = tiny().generate([PROMPT] * 4, [*free, *map(asked, SCHEMAS[:2])])
    for a, b in zip(alone, mixed, strict=False):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids and a.outputs[0].logprobs == b.outputs[0].logprobs


def test_rows_with_grammars_run_ahead_of_their_tokens():
    llm, ahead = tiny(), []
    llm.engine.observers.append(lambda engine: ahead.append(engine.num_steps_under_way))
    llm.generate([PROMPT] * 2, [asked(SCHEMAS[0]), asked(max_tokens=40)])
    assert ahead.count(1) > 0.9 * len(ahead) > 20


def test_forced_tokens_are_drafts_that_are_accepted():
    only = StructuredOutputsParams(choice=["def one_of_the_longest_names_of_all(): return None"])
    llm = tiny(**GRAMMAR)
    [output] = llm.generate(PROMPT, asked(structured_outputs=only))
    assert output.outputs[0].text == only.choice[0]
    steps = len(llm.engine.records)
    assert steps <= 0.4 * len(output.outputs[0].token_ids) and output.metrics.num_accepted_tokens > 0


def test_rows_without_grammars_run_ahead_where_only_grammars_draft():
    llm, ahead = tiny(**GRAMMAR), []
    llm.engine.observers.append(lambda engine: ahead.append(engine.num_steps_under_way))
    llm.generate(PROMPT, asked(max_tokens=40))
    assert ahead.count(1) > 0.9 * len(ahead) > 20


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]"}, "[a-c]{3}-[0-9]"),
        ({"choice": ['say "hi"', "a\\b", "new\nline", "é😀"]}, r'say "hi"|a\\b|new\nline|é😀'),
        ({"grammar": 'start: "a" "b"~1..3 "c"'}, "ab{1,3}c"),
        ({"grammar": 'root ::= "x" | "y" "z"'}, "x|yz"),
        ({"structural_tag": {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}]}}, None),
    ],
)
def test_other_kinds_of_grammars(given, pattern):
    outputs = tiny().generate([PROMPT] * 8, [asked(structured_outputs=given, seed=i, max_tokens=20) for i in range(8)])
    for output in outputs:
        text = output.outputs[0].text
        assert re.fullmatch(pattern, text) if pattern else "<f" not in text or "<f>" in text


def test_an_object_has_at_most_32_characters_of_white_space_in_a_row():
    llm = tiny()
    params = asked(structured_outputs=StructuredOutputsParams(json=SCHEMAS[0]), logit_bias={36: 100, 281: 100})
    [output] = llm.generate(PROMPT, params)
    assert output.outputs[0].finish_reason == "stop"
    assert max(len(run) for run in re.findall(r"\s+", output.outputs[0].text)) in range(17, 33)


def test_scores_are_of_the_tokens_that_the_grammar_allows():
    both = StructuredOutputsParams(choice=["yes", "no"])
    [output] = tiny().generate(PROMPT, asked(structured_outputs=both, temperature=0, logprobs=-1))
    rows = np.exp(np.asarray(output.outputs[0].distributions, np.float64))
    assert np.allclose(rows.sum(axis=1), 1, atol=1e-5) and (rows > 0).sum(axis=1).max() < 10


def test_a_pydantic_model_is_its_schema():
    from pydantic import BaseModel

    class Point(BaseModel):
        x: int

    assert json.loads(StructuredOutputsParams(json=Point).json) == Point.model_json_schema()


def test_nothing_is_compiled_for_another_grammar_or_for_rows_without_one():
    llm = tiny(programs={})
    llm.generate(PROMPT, asked(max_tokens=4))
    assert not any(key[5] for key in llm.engine.executor.programs if key[0] == "sample")
    llm.generate(PROMPT, asked(SCHEMAS[0]))
    before = llm.num_compilations
    for schema in SCHEMAS[1:]:
        llm.generate(PROMPT, asked(schema))
    assert llm.num_compilations == before


def test_warm_up_compiles_what_grammars_need():
    llm = tiny()
    llm.warm_up(sampling_params=asked(SCHEMAS[0]))
    before = llm.num_compilations
    llm.generate([PROMPT, "x"], [asked(SCHEMAS[0]), asked(max_tokens=4)])
    assert llm.num_compilations == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": {"not": {"type": "string"}}}, 'has a json that cannot be enforced: Unimplemented keys: ["not"]'),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "string", "format": "postcode"}}, "Unknown format: postcode"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 1}}, "Unsatisfiable schema"),
        ({"json": True}, "it is not an object"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"json": "{"}, "json is '{', must be JSON"),
        ({"json": "[" * 100_000}, "must be JSON"),
        ({"json": {"enum": ["x" * 2**17]}}, "characters, at most 131,072 are compiled"),
        ({"choice": []}, "must be a list of 1 to 4,096 texts"),
        ({"choice": ["a", ""]}, "has '', each must be a text"),
        ({"regex": ""}, "regex is '', must be a text"),
        ({"json_object": False}, "must be True or None"),
        ({"regex": "a", "choice": ["a"]}, "has regex and choice of"),
        ({}, "has none of json, regex"),
        ({"schema": {}}, "has unknown fields schema"),
        ({"structural_tag": {"triggers": []}}, "needs triggers, and structures"),
    ],
)
def test_a_grammar_that_cannot_be_enforced_is_refused_by_name(given, message):
    llm = tiny()
    with pytest.raises(ValueError, match=r"^structured_outputs") as caught:
        llm.generate(PROMPT, asked(structured_outputs=given))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not llm.engine.records


def test_a_grammar_that_takes_too_long_fails_its_request_alone(monkeypatch):
    llm, slow, good = tiny(), asked(structured_outputs={"regex": "[a-z]{99}"}), asked(SCHEMAS[0])
    assert llm.generate(PROMPT, good)[0].outputs[0].finish_reason == "stop"
    compiled = llm.engine.factory.grammars.matcher(slow.structured_outputs)
    monkeypatch.setattr(grammar, "SPARE_S", 0)
    monkeypatch.setattr(grammar, "MASK_S", 1e-7)
    [failed] = llm.generate(PROMPT, slow)
    assert failed.outputs[0].error == "structured_outputs: its masks take too long" and compiled.error is None
    monkeypatch.undo()
    assert [o.outputs[0].finish_reason for o in llm.generate([PROMPT] * 2, [slow, good])] == ["stop", "stop"]


def test_what_an_engine_needs_for_grammars(monkeypatch):
    with pytest.raises(ValueError, match="needs a tokenizer"):
        make_llm(None).generate([{"prompt_token_ids": [2]}], asked(SCHEMAS[0], detokenize=False))
    with pytest.raises(ValueError, match="the tokenizer cannot express the text that must follow"):
        make_llm(Letters()).generate("a", asked(SCHEMAS[0]))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        ValueError, match=r"needs llguidance, the extra structured: pip install 'ksana-jax\[structured\]'"
    ):
        tiny().generate(PROMPT, asked(SCHEMAS[0]))


def test_a_tokenizer_that_lacks_characters_serves_what_it_can_write():
    words = StructuredOutputsParams(choice=["the end", "an é"])
    [output] = make_llm(Letters(), **NGRAM).generate("a", asked(structured_outputs=words))
    assert output.outputs[0].text in words.choice


@pytest.mark.parametrize("kind", [JsonTokenizer, SentencePieceTokenizer])
def test_every_kind_of_tokenizer_writes_what_a_schema_allows(kind):
    tokenizer = load_tokenizer("ksana-tiny")
    if kind is SentencePieceTokenizer:
        data = (Path(model_path("ksana-tiny")) / "tokenizer.model").read_bytes()
        tokenizer = SentencePieceTokenizer("tokenizer.model", data, {}, SpecialTokens(), {})
    assert isinstance(tokenizer, kind)
    grammars = grammar.Grammars(tokenizer, 1030, tokenizer.eos_ids)
    text = json.dumps({"name": "an é", "age": 12}, ensure_ascii=False)
    ids = [*grammar._Vocabulary(tokenizer, 1030, tokenizer.eos_ids[0])(text.encode()), tokenizer.eos_ids[0]]
    matcher, mask = grammars.matcher(StructuredOutputsParams(json=SCHEMAS[0])), np.zeros(33, np.int32)
    for at, token in enumerate(ids):
        matcher.follow(np.array(ids[:at]))
        matcher.allow(mask, ())
        assert mask.view(np.uint32)[token // 32] >> (token % 32) & 1, (at, tokenizer.decode(ids[:at]))


def test_equal_grammars_are_compiled_once_and_the_oldest_are_dropped(monkeypatch):
    monkeypatch.setattr(grammar, "MAX_GRAMMARS", 2)
    grammars, compiled = tiny().engine.factory.grammars, []
    compile_one = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda asked: compiled.append(asked.regex) or compile_one(asked))
    for regex in "abacab":
        grammars.matcher(StructuredOutputsParams(regex=regex))
    assert "".join(compiled) == "abcb"


def test_grammars_are_compiled_off_the_event_loop(monkeypatch):
    llm, threads = tiny(), []
    grammars = llm.engine.factory.grammars
    compile_one = grammars._compile
    monkeypatch.setattr(
        grammars, "_compile", lambda asked: threads.append(threading.current_thread().name) or compile_one(asked)
    )

    async def ask():
        async with AsyncLLM.around(llm) as served:
            return [output async for output in served.generate(PROMPT, asked(SCHEMAS[0]))]

    json.loads(asyncio.run(ask())[-1].outputs[0].text)
    assert [name.rpartition("-")[0] for name in threads] == ["ksana-text"]
