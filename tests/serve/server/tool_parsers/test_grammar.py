"""Grammars of tool calls: what each parser's form, and text around it, may be; token by token."""

import pytest

from ksana_jax import StructuredOutputsParams
from ksana_jax.core.sources import model_path
from ksana_jax.sampling.grammar import Grammars
from ksana_jax.serve.server.tool_parsers.base import NAME
from ksana_jax.serve.server.tool_parsers.grammar import Schema, call_grammar
from ksana_jax.serve.server.tool_parsers.registry import PARSERS
from ksana_jax.tokenizers import load_tokenizer

AGE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SCHEMAS = [Schema("f", AGE), Schema("g", None)]
# The bundled model's tokenizer writes a space for DeepSeek's \u2581.
FORMS = {name: parser.form for name, parser in PARSERS.items() if parser.form and "deepseek" not in name}
TOKENIZER = load_tokenizer(model_path("ksana-tiny"))
GRAMMARS = Grammars(TOKENIZER, TOKENIZER.vocab_size, [2])


def allowed(text, **given) -> bool:
    """Whether a text is all that an output may be."""
    matcher = GRAMMARS.matcher(StructuredOutputsParams(**given))._matcher
    ids = TOKENIZER.encode(text, add_special_tokens=False) if text else []
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(form, *calls):
    made = [form.begin.replace(NAME, name) + arguments + form.end for name, arguments in calls]
    return form.before + form.between.join(made) + form.after


@pytest.mark.parametrize("name", FORMS)
def test_arguments_follow_schemas_whether_calls_are_required_or_not(name):
    form, parser = FORMS[name], PARSERS[name]
    both, bad = written(form, ("f", '{"a": 1}'), ("g", '{"b": []}')), written(form, ("f", '{"b": 1}'))
    for required in (True, False):
        grammar = call_grammar(parser, form, SCHEMAS, {}, required=required, several=True)
        assert allowed(both, grammar=grammar) and not allowed(bad, grammar=grammar)
        assert not allowed(written(form, ("h", "{}")), grammar=grammar)
        assert [allowed(text, grammar=grammar) for text in ("", "Hello.")] == [not required] * 2
    if parser.anywhere:
        assert allowed(f"So: {both}", grammar=grammar) and not allowed(f"So: {bad}", grammar=grammar)
    one = call_grammar(parser, form, SCHEMAS, {}, required=True, several=False)
    assert allowed(written(form, ("g", "{}")), grammar=one) and not allowed(both, grammar=one)


KINDS = [{"json": AGE}, {"regex": r'\{"a": 1\}'}, {"choice": ['{"a": 1}']}, {"grammar": 'start: "{\\"a\\": 1}"'}]


@pytest.mark.parametrize("given", KINDS)
def test_every_kind_of_grammar_can_begin_after_reasoning_in_a_channel(given):
    """Tags of several special tokens, as of gpt-oss; <s> stands for them."""
    thinking, text = ("<s>analysis<s>", "<s>final<s>"), '{"a": 1}'
    assert allowed(f"<s>analysis<s>{{}} a<s>final<s>{text}", thinking=thinking, **given)
    for bad in (f"<s>analysis<s>a<s>{text}", "<s>analysis<s>a<s>final<s>a", "<s>analysis<s>a", f"<s>final<s>{text}"):
        assert not allowed(bad, thinking=thinking, **given)


@pytest.mark.parametrize("given", KINDS)
def test_every_kind_of_grammar_can_begin_after_reasoning(given):
    text = '{"a": 1}'
    for thinking, before in ((("<think>", "</think>"), "<think>{} a"), (("", "</think>"), "{} a")):
        assert allowed(f"{before}</think>\n\n{text}", thinking=thinking, **given)
        assert not allowed(f"{before}</think>a", thinking=thinking, **given)
        assert not allowed(before, thinking=thinking, **given)
        assert allowed(text, thinking=thinking, **given) == bool(thinking[0])
