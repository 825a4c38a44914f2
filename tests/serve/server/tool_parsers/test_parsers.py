"""Parsers of tool calls on texts as the models' cards and templates write them, whole and in any pieces."""

import json
import random

import pytest

from ksana_jax.serve.server.answer_parts import MAX_CALL_CHARS, AnswerParts, Call, Text, message_of, thinking_tags
from ksana_jax.serve.server.tool_parsers.base import NAME
from ksana_jax.serve.server.tool_parsers.registry import PARSERS, parser_for

KINDS = {"a": "integer", "b": "string", "c": "array", "d": "boolean", "e": ["string", "null"], "n": "number"}
SCHEMA = {"properties": {name: {"type": kind} for name, kind in KINDS.items()} | {"o": {"$ref": "#/$defs/O"}}}
NAMES = {"f": SCHEMA, "g": None}
F, G = Call("f", '{"a": 1}'), Call("g", "{}")
CALLS = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
# By parser: texts, and the content and calls in them.
READ = [
    ("hermes", 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ["Hm.", F]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>\n'
        '<tool_call>{"name": "g"}</tool_call>.',
        [Call("f", '{"a": "</tool_call>"}'), G, "."],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [F]),
    ("smollm", '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</tool_call>', [F, G]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', [F, G]),
    ("llama3_json", '\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [F]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', [F, G]),
    ("mistral_args", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}', [F, G]),
    (
        "deepseek_v31",
        "So:" + CALLS.format(CALL.format('f<｜tool▁sep｜>{"a": 1}') + CALL.format("g<｜tool▁sep｜>{}")),
        ["So:", F, G],
    ),
    ("deepseek_v3", CALLS.format(CALL.format('function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```')), [F]),
    ("gemma", "```tool_code\nprint(f(a=1))\ng()\n```", [F, G]),
    ("pythonic", "[f(a=1), g()]", [F, G]),
    ("pythonic", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>Done.", [F, "Done."]),
    (
        "pythonic",
        "[f(a='x\\'], \"', b=[-1.5e3, true, None], c={'k': {}})]",
        [Call("f", json.dumps({"a": "x'], \"", "b": [-1500.0, True, None], "c": {"k": {}}}))],
    ),
]
XML = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
PARAMETER = "<parameter={}>\n{}\n</parameter>\n"


def xml(name, **arguments):
    return XML.format(name, "".join(PARAMETER.format(*item) for item in arguments.items()))


def dsml(*calls, block="function_calls"):
    made = [f'<｜DSML｜invoke name="{name}">\n{inside}</｜DSML｜invoke>\n' for name, inside in calls]
    return f"<｜DSML｜{block}>\n{''.join(made)}</｜DSML｜{block}>"


def dsml_value(name, text, is_text):
    return f'<｜DSML｜parameter name="{name}" string="{str(is_text).lower()}">{text}</｜DSML｜parameter>\n'


def called(**arguments):
    return Call("f", json.dumps(arguments, ensure_ascii=False))


Q = '<|"|>'
READ += [
    ("qwen3_xml", "Hm.\n" + xml("f", a="1") + "\n" + xml("g"), ["Hm.", F, G]),
    ("qwen3_xml", xml("f", a="1").replace("<tool_call>\n", ""), [F]),  # as Qwen3-Coder does at times
    (
        "qwen3_xml",
        xml("f", b=" x\n</parameter> é\n", c='["1"]', d="True", e="null", o='{"k": 1}', n="-2.5", x="7"),
        [called(b=" x\n</parameter> é\n", c=["1"], d=True, e=None, o={"k": 1}, n=-2.5, x="7")],
    ),
    ("qwen3_xml", xml("f", a="many", b="7", e="7", o="red"), [called(a="many", b="7", e="7", o="red")]),
    ("qwen3_xml", xml("f", b='<tool_call>"</tool_call>'), [called(b='<tool_call>"</tool_call>')]),
    ("deepseek_v32", "So:\n\n" + dsml(("f", dsml_value("a", "1", False)), ("g", "")), ["So:", F, G]),
    (
        "deepseek_v32",
        dsml(("f", dsml_value("b", "1\n</｜DSML｜parameter>", True) + dsml_value("o", '{"k": [null]}', False))),
        [called(b="1\n</｜DSML｜parameter>", o={"k": [None]})],
    ),
    ("deepseek_v32", dsml(("g", ""), block="tool_calls") + "Done.", [G, "Done."]),
    ("gemma4", "So: <|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{}<tool_call|>", ["So:", F, G]),
    (
        "gemma4",
        f'<|tool_call>call:f{{b:{Q}a, "b": {{c}}<tool_call|>\n{Q},c:[{Q}x{Q},-1.5e3,null],d:true,'
        f"o:{{k:{{}},7:{Q}{Q}}}}}<tool_call|>",
        [called(b='a, "b": {c}<tool_call|>\n', c=["x", -1500.0, None], d=True, o={"k": {}, "7": ""})],
    ),
    ("gemma4", "<|tool_call>call:f{b:deep red,a b:{c:1}}<tool_call|>", [called(**{"b": "deep red", "a b": {"c": 1}})]),
    (
        "deepseek_v32",
        dsml(("f", dsml_value("a", "1", False))).replace("｜function_", "｜ ").replace("｜p", "｜ p"),
        [F],
    ),
]
# Texts that stay as they are.
BROKEN = [
    ("qwen3_xml", "<tool_call>\n<function=f>\n<parameter=a>\n1"),
    ("qwen3_xml", xml("f", a="1").replace("</function>", "")),
    ("qwen3_xml", "<tool_call>{}</tool_call>"),
    ("qwen3_xml", xml("h", a="1")),
    ("qwen3_xml", xml("f", b="<parameter=" * 5000).replace("</parameter>", "")),
    ("deepseek_v32", dsml(("f", dsml_value("a", "one", False)))),
    ("deepseek_v32", dsml(("f", dsml_value("a", "1 2", False)))),
    ("deepseek_v32", dsml(("f", "{}"))),
    ("deepseek_v32", "<｜DSML｜function_calls>"),
    ("gemma4", "<|tool_call>call:f{a:1"),
    ("gemma4", f"<|tool_call>call:f{{b:{Q}x<tool_call|>"),
    ("gemma4", f"<|tool_call>call:f{{b:two {Q}words{Q}}}<tool_call|>"),
    ("gemma4", "<|tool_call>call:f<tool_call|>"),
    ("gemma4", "<|tool_call>call:f{a:" + "[" * 20_000 + "<tool_call|>"),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}'),
    ("hermes", "<tool_call>{name: f}</tool_call> and more"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'),
    ("hermes", "<tool_call>" + '{"name": "f", "arguments": {"a": "' + "x" * MAX_CALL_CHARS + '"}}</tool_call>'),
    ("hermes", "<tool_call>" + "[" * 30_000 + "</tool_call>"),
    ("smollm", "<tool_call>[1]</tool_call>"),
    ("llama3_json", '{"a": 1} is JSON'),
    ("llama3_json", '{"name": "f"}'),
    ("llama3_json", 'Call {"name": "f", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS] f"),
    ("mistral", "[TOOL_CALLS][1]"),
    ("deepseek_v31", CALLS.format(CALL.format("f{}"))),
    ("gemma", "```tool_code\nimport os\n```"),
    ("gemma", "```tool_code\nf(a=__import__('os'))\n```"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[]"),
    ("pythonic", "[f(a=g())]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a='x"),
    ("pythonic", "[f(a='\\N{none}')]"),
    ("pythonic", "[f(a=" + "[" * 20_000 + "]" * 20_000 + ")]"),
]
TAGS = ("<think>", "</think>")


def merged(parts):
    """Content as texts, reasoning as (text,), neighbours joined."""
    found = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Text) and isinstance(last, Text) and last.kind == part.kind:
            found[-1] = Text(part.kind, last.text + part.text)
        else:
            found.append(part)
    of_kind = {"content": str, "reasoning_content": lambda text: (text,)}
    return [of_kind[one.kind](one.text) if isinstance(one, Text) else one for one in found]


def in_pieces(parts, text, seed=0):
    draw, found = random.Random(seed), []
    while text:
        count = draw.choice((1, 1, 2, 3, 8)) if len(text) < 2000 else 1000
        found, text = found + parts.feed(text[:count]), text[count:]
    return merged(found + parts.feed("", last=True))


@pytest.mark.parametrize(("name", "text", "expected"), READ)
@pytest.mark.parametrize("before", ["", "<think>I {call}.</think>\n\n"])
def test_calls_are_found_whatever_the_pieces(name, text, expected, before):
    thinking = TAGS if before else None
    expected = [("I {call}.",), *expected] if before else expected
    assert merged(AnswerParts(thinking, PARSERS[name], NAMES).feed(before + text, last=True)) == expected
    for seed in range(20):
        assert in_pieces(AnswerParts(thinking, PARSERS[name], NAMES), before + text, seed) == expected


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_what_is_no_call_stays_text(name, text):
    assert merged(AnswerParts(None, PARSERS[name], NAMES).feed(text, last=True)) == [text]
    assert in_pieces(AnswerParts(None, PARSERS[name], NAMES), text) == [text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{think}<|end|>{call}{{"a": 1}}', [("Hm.",), F]),
        ('{think}<|end|>{call}{{"a": 1}}<|call|>', [("Hm.",), F]),
        ("{think}<|end|>{start}{final}Yes.\n\n{{}} <b>", [("Hm.",), "Yes.\n\n{} <b>"]),
        ("{think}<|end|>{start}{final}Yes.<|return|>", [("Hm.",), "Yes."]),
        ("{final}Yes.", ["Yes."]),
        (' to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}', [F]),
        ("{final}Say to=functions.f and wait.", ["Say to=functions.f and wait."]),
        ("{think}", [("Hm.",)]),
        (
            "{think}<|end|>{start}{preamble}I call f.<|end|>{start}{think}<|end|>{call}{{}}<|call|>{call}{{}}",
            [("Hm.",), "I call f.", ("Hm.",), called(), called()],
        ),
        ('{think}<|end|>{start} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}', [("Hm.",), F]),
        ("{start}<|channel|>commentary to=functions.f<|constrain|>json<|message|>{{}}", [called()]),
    ],
)
def test_channels_are_divided(text, expected):
    start, think = "<|start|>assistant", "<|channel|>analysis<|message|>Hm."
    final, preamble = "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"
    call = f"{start}<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    text = text.format(start=start, think=think, final=final, preamble=preamble, call=call)
    tags, parser = thinking_tags(think, "<|start|>assistant"), PARSERS["openai"]
    assert merged(AnswerParts(tags, parser, NAMES).feed(text, last=True)) == expected
    for seed in range(20):
        assert in_pieces(AnswerParts(tags, parser, NAMES), text, seed) == expected


def test_a_call_of_an_unknown_function_in_a_channel_stays_text():
    text = "<|channel|>commentary to=functions.h <|constrain|>json<|message|>{}"
    assert in_pieces(AnswerParts(TAGS, PARSERS["openai"], NAMES), text) == [text]


@pytest.mark.parametrize("name", [name for name, parser in PARSERS.items() if parser.form is not None])
def test_the_form_that_a_grammar_enforces_is_read_back(name):
    form = PARSERS[name].form
    calls = [form.begin.replace(NAME, call.name) + call.arguments + form.end for call in (F, G)]
    text = form.before + form.between.join(calls) + form.after
    assert merged(AnswerParts(None, PARSERS[name], NAMES).feed(text, last=True)) == [F, G]


def test_one_call_is_kept_if_more_are_not_wanted():
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert in_pieces(AnswerParts(None, PARSERS["hermes"], NAMES, several=False), text) == [F]


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        (TAGS, "<think>\nHm</think>\n\nYes", [("Hm",), "Yes"]),
        (TAGS, "Yes <think>", ["Yes <think>"]),
        (TAGS, "<thinker> ", ["<thinker> "]),
        (("", "</think>"), "Hm < 3</think>Yes", [("Hm < 3",), "Yes"]),
        (("", "</think>"), "Hm</th", [("Hm</th",)]),
        (None, " <think>", [" <think>"]),
        (("<|channel>thought", "<channel|>"), "<|channel>thought\nHm<channel|>Yes", [("Hm",), "Yes"]),
    ],
)
def test_reasoning_is_divided_from_the_answer(thinking, text, expected):
    for seed in range(10):
        assert in_pieces(AnswerParts(thinking), text, seed) == expected


def test_the_end_of_the_prompt_says_whether_reasoning_has_begun():
    template = "{% if x %}</think>{% endif %}"
    assert thinking_tags(template, "a:") == TAGS
    assert thinking_tags(template, "a:<think>\n") == ("", "</think>")
    assert thinking_tags(template, "a:<think>\n\n</think>\n\n") is None
    assert thinking_tags("a", "<think>") is None


def test_a_message_has_only_what_the_answer_has():
    assert message_of([]) == {"role": "assistant", "content": ""}
    message = message_of([Text("reasoning_content", "Hm"), F])
    assert (message["content"], message["reasoning_content"]) == (None, "Hm")
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'} and len(call["id"]) == 9


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("For each function call return <tool_call>...", "hermes"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS] [ARGS]", "mistral_args"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("named SmolLM, trained by", "smollm"),
        ("<|tool_call_start|>", "pythonic"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", "qwen3_xml"),
        ("<｜DSML｜function_calls>", "deepseek_v32"),
        ("{{ '<|tool_call>call:' }}", "gemma4"),
        ("<|channel|>analysis<|message|>", "openai"),
        ("```tool_code", "gemma"),
        ("{{ messages }}", "llama3_json"),
    ],
)
def test_a_template_chooses_its_parser(template, name):
    assert parser_for(template) is PARSERS[name]
