"""Chat templates: what they give, whom they refuse, and what they may not do."""

import datetime
import json
import shutil

import pytest

from ksana_jax.tokenizers import ChatTemplateError, load_tokenizer, render_chat
from ksana_jax.tokenizers.chat import MAX_OUTPUT_CHARS, MAX_TEMPLATE_CHARS

HELLO = [{"role": "user", "content": "hello"}]


def test_messages_are_laid_out_and_their_marks_become_ids(tokenizer):
    text = render_chat(tokenizer, [{"role": "system", "content": "be brief"}, *HELLO])
    assert text == (
        "<|begin|><|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == 1
    assert ids.count(tokenizer.eos_id) == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_generation_prompt_can_be_left_out(tokenizer):
    assert render_chat(tokenizer, HELLO, add_generation_prompt=False).endswith("hello<|im_end|>\n")


def test_template_is_found_in_its_own_file_before_the_config(directories, tmp_path):
    path = shutil.copytree(directories["byte-level"], tmp_path / "model")
    config = json.loads((path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert render_chat(load_tokenizer(path), HELLO) == "default"
    (path / "chat_template.jinja").write_text("file")
    assert render_chat(load_tokenizer(path), HELLO) == "file"


NAMED = [{"name": "tool_use", "template": "x"}, {"name": "rag", "template": "y"}]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("tokenizer_config.json", json.dumps({"chat_template": NAMED}), "named 'default'; it has 'tool_use', 'rag'"),
        ("tokenizer_config.json", '{"chat_template": []}', "a list without one named 'default'; it has none"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is int, must be a string"),
        ("chat_template.jinja", "\udcff", "is not UTF-8"),
        ("chat_template.jinja", "", "is empty"),
        ("chat_template.jinja", "{% if %}", "chat template refused: line 1"),
    ],
)
def test_template_that_cannot_be_used_is_an_error_only_for_chats(directories, tmp_path, name, data, said):
    path = shutil.copytree(directories["llama-like"], tmp_path / "model")
    (path / name).write_bytes(data.encode(errors="surrogateescape"))
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("the") == load_tokenizer(directories["llama-like"]).encode("the")
    with pytest.raises(ValueError, match=said) as caught:
        render_chat(tokenizer, HELLO)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value) or tokenizer.chat_template


def test_tokenizer_without_a_template_says_so(directories):
    with pytest.raises(ValueError, match=r"tokenizer\.model comes without a chat template"):
        render_chat(load_tokenizer(directories["sentencepiece"]), HELLO)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m['content'] }}\n  {% endif %}\n{% endfor %}", "hello\n"),
        ("{{ {'é': [1, '<a>']} | tojson }}", '{"é": [1, "<a>"]}'),
        ("{{ messages | tojson(indent=1) }}", json.dumps(HELLO, indent=1)),
        ("{{ strftime_now('%d %b %Y') }}", "11 Dec 2025"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ eos_token }}{% endgeneration %}", "<|im_end|>"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ dict(a=1).a }}", "21"),
        ("{{ '%s-%d' | format('a', 3) }}{{ '%02d' % 7 }}{{ '{:>3}'.format('b') }}", "a-307  b"),
        ("{{ 'a' * 3 }}{{ 2 ** 5 }}{{ ([1] + [2]) | join(',') }}", "aaa321,2"),
        ("{{ tools is none }}{{ unknown is defined }}{{ thinking }}", "TrueFalseon"),
        ("{{ messages[0].content.split('l')[0].strip() | upper }}", "HE"),
    ],
)
def test_what_templates_use_is_there(render, template, expected):
    now = datetime.datetime(2025, 12, 11)
    assert render(template, now=now, thinking="on") == expected


def test_template_can_refuse_the_messages(render):
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('a system message\ncomes first') }}{% endif %}"
    with pytest.raises(ChatTemplateError, match=r"^chat template refused: a system message comes first$"):
        render(template)


REFUSED = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ (messages | attr('__class__')).__name__ }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ strftime_now.__closure__[0].cell_contents }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__globals__.json }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ 10 ** 9 * ['a'] }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 'a'.ljust(10 ** 9) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a\nb' | indent(1000000000) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ [1] | slice(1000000000) | list }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{% set ns = namespace(t='a' * 1000) %}{% for i in range(40) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
    "{% for i in range(90000) %}{{ 'a' * 100 }}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ lipsum(1000) }}",
    "{{ 1 / 0 }}",
    "{{ messages[0].nothing.at_all }}",
    "{{ unclosed",
    "{% for %}",
    "{% nonsense %}",
    "{{ x | nofilter }}",
]


@pytest.mark.parametrize("template", REFUSED)
def test_template_that_does_what_it_may_not_is_refused_in_one_line(render, template):
    with pytest.raises(ChatTemplateError) as caught:
        render(template)
    message = str(caught.value)
    assert message.startswith("chat template refused: ") and "\n" not in message and len(message) < 400


def test_hidden_attributes_render_as_nothing_at_most(render):
    for hidden in (
        "messages.__class__",
        "raise_exception.__globals__",
        "messages | map(attribute='__class__') | first",
        "self._TemplateReference__context",
    ):
        try:
            text = render("[{{ " + hidden + " }}]")
        except ChatTemplateError:
            continue
        assert text == "[]"


def test_output_is_limited(render):
    long = [{"role": "user", "content": "x" * (MAX_OUTPUT_CHARS + 1)}]
    with pytest.raises(ChatTemplateError, match="output is longer than 1,048,576 characters"):
        render("{{ messages[0].content }}", long)
    with pytest.raises(ChatTemplateError, match="it has 131,073 characters; supported: at most 131,072"):
        render("x" * (MAX_TEMPLATE_CHARS + 1))
    with pytest.raises(ChatTemplateError, match="it has 26,002 statements and expressions; supported: at most 20,000"):
        render("{{a}}" * 26_000)


def test_messages_are_not_changed_by_a_template(render):
    messages = [{"role": "user", "content": "hello"}]
    render("{% set m = messages[0] %}{% for m in messages %}{% set m = 1 %}{% endfor %}", messages)
    assert messages == HELLO


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "at least one message"),
        ("hello", "must be a list"),
        (HELLO[0], "must be a list"),
        (None, "must be a list"),
        (["hello"], r"messages\[0\] is str, must be a dict"),
        ([*HELLO, {"content": "x"}], r"messages\[1\] has no role"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\] 'content' is list, must be a string"),
        ([{"role": None, "content": "x"}], r"messages\[0\] 'role' is NoneType, must be a string"),
        ([{"role": "user", "content": "x", "calls": [1]}], r"messages\[0\] 'calls' is list, must be a string"),
    ],
)
def test_messages_of_another_form_are_refused(tokenizer, messages, problem):
    with pytest.raises(ValueError, match=problem):
        render_chat(tokenizer, messages)
