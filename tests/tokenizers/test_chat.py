"""Chat templates: what they give, whom they refuse, and what they may not do."""

import datetime
import json
import shutil

import pytest

from ksana_jax.tokenizers import ChatTemplateError, load_tokenizer, render_chat
from ksana_jax.tokenizers.gguf_tokenizer import gguf_tokenizer
from ksana_jax.tokenizers.messages import MAX_ARGUMENT_CHARS
from ksana_jax.tokenizers.template_sandbox import MAX_OUTPUT_CHARS, MAX_TEMPLATE_CHARS
from tests.tokenizers.test_gguf_tokenizer import metadata

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
        ("tokenizer_config.json", json.dumps({"chat_template": NAMED}), "named 'default'.*one of 'tool_use', 'rag'"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "chat_template is NoneType, must be a string"),
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
    assert render(template, now=now, chat_template_kwargs={"thinking": "on"}) == expected


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
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ 10 ** 9 * ['a'] }}",
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
        "dict.__globals__.json",
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
        ([{"role": "user", "content": None}], r"messages\[0\].content is None, must be a text or a list of parts"),
        ([{"role": "user", "content": []}], r"messages\[0\].content is \[\], must be a text or a list of parts"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            r"messages\[0\].content\[0\].text is None, must be a string",
        ),
        ([{"role": "user", "content": [{"type": "image"}]}], r"content\[0\] is of type 'image': only text content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], r"messages\[0\].content is None, must be a text"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], r"messages\[0\].tool_calls is {'a': 1}, must be a list"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            r"tool_calls\[0\] must be an object whose function",
        ),
        ([{"role": None, "content": "x"}], r"messages\[0\] 'role' is NoneType, must be a string"),
        ([{"role": "user", "content": "x", "calls": {print}}], r"messages\[0\].calls is set, must be a text, a number"),
    ],
)
def test_messages_of_another_form_are_refused(tokenizer, messages, problem):
    with pytest.raises(ValueError, match=problem):
        render_chat(tokenizer, messages)


CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
# As templates of models that call tools are written: null means that there is no text, arguments are objects.
CALLING = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }}{% endfor %}]{% endif %}"
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def test_parts_of_a_content_are_joined_by_line_breaks(render):
    parts = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_history_with_calls_and_their_answers_is_laid_out(render, content):
    history = [
        *HELLO,
        {"role": "assistant", "tool_calls": CALLS, **content},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
    ]
    assert render(CALLING, history, tools=TOOLS) == '[add]user:hello;assistant:<add {"a": 1}>;tool:2;a:'
    # A template without calls has no null to write out.
    assert (
        render("{% for m in messages %}{{ m.role + m.content }};{% endfor %}", history) == "userhello;assistant;tool2;"
    )
    # gpt-oss's looks into any content that is there.
    looking = (
        '{% for message in messages %}{% if "content" in message and "<|" in message.content %}!{% endif %}'
        "{{ message.role }}"
        "{% if message.tool_calls %}:{{ message.tool_calls[0].function.name }}{% endif %};{% endfor %}"
    )
    assert render(looking, history) == "user;assistant:add;tool;"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [("", "{}"), (None, "{}"), ({"a": 1}, '{"a": 1}'), ('{"a": ', '"{\\"a\\": "'), ("[1]", '"[1]"')],
)
def test_arguments_that_are_no_text_of_an_object_stay_as_they_are(render, arguments, shown):
    call = {"function": {"name": "f", "arguments": arguments}}
    assert render(CALLING, [{"role": "assistant", "tool_calls": [call]}]).startswith(f"assistant:<f {shown}>;")


def test_arguments_of_a_call_are_parsed_up_to_a_limit(render):
    long = json.dumps({"a": "x" * MAX_ARGUMENT_CHARS})
    call = {"function": {"name": "f", "arguments": long}}
    assert json.dumps(long) in render(CALLING, [{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "<hello><so "),
        ("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", "<hello><so"),
        (
            "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}a{% endif %}",
            "<hello><so ",
        ),
    ],
)
def test_the_last_message_can_be_continued(render, template, text):
    messages = [*HELLO, {"role": "assistant", "content": "so "}]
    assert render(template, messages, continue_final_message=True) == text
    assert messages[-1]["content"] == "so "


def test_what_a_template_drops_cannot_be_continued(render):
    with pytest.raises(ChatTemplateError, match="does not write the last message, which cannot be continued"):
        render("{{ messages[0].content }}", [*HELLO, *HELLO], continue_final_message=True)
    with pytest.raises(ValueError, match="add_generation_prompt begins a new message"):
        render("{{ messages[0].content }}", continue_final_message=True, add_generation_prompt=True)


SPECIAL = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "image_token",
    "boi_token", "extra_special_tokens", "additional_special_tokens",
)  # fmt: skip
SHOW = "".join(f"{{% if {name} is defined %}}{name}={{{{ {name} }}}};{{% endif %}}" for name in SPECIAL)
AS_OBJECT = {"__type": "AddedToken", "content": "<s>", "special": True}
# A tokenizer_config.json, a special_tokens_map.json, and what transformers 5.23.0's apply_chat_template gives.
TRANSFORMERS = {
    "none": ({}, {}, ""),
    "all": (dict.fromkeys(SPECIAL[:7], "<s>"), {}, "".join(f"{name}=<s>;" for name in SPECIAL[:7])),
    "null": ({"bos_token": "<s>", "pad_token": None}, {}, "bos_token=<s>;"),
    "empty": ({"bos_token": "", "eos_token": None}, {}, "bos_token=;"),
    "objects": ({"bos_token": AS_OBJECT, "image_token": AS_OBJECT}, {}, "bos_token=<s>;image_token=<s>;"),
    "names": ({"extra_special_tokens": {"image_token": "<s>", "boi_token": AS_OBJECT}}, {},
              "image_token=<s>;boi_token=<s>;"),
    "saved names": ({"model_specific_special_tokens": {"boi_token": "<s>"}}, {}, "boi_token=<s>;"),
    "lists": ({"extra_special_tokens": ["<s>"], "additional_special_tokens": ["<s>"]}, {}, ""),
    "flags": ({"add_bos_token": True, "image_token": True, "pad_token": "<new>"}, {}, "pad_token=<new>;"),
    "older": ({"bos_token": "<s>"}, {"pad_token": AS_OBJECT, "image_token": "</s>"},
              "bos_token=<s>;pad_token=<s>;image_token=</s>;"),
    "older, beside a complete file": ({"bos_token": "<s>", "added_tokens_decoder": {}}, {"pad_token": "<s>"},
                                      "bos_token=<s>;"),
}  # fmt: skip


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_special_tokens_have_the_names_that_transformers_gives_them(directories, tmp_path, case):
    config, older, expected = TRANSFORMERS[case]
    path = shutil.copytree(directories["llama-like"], tmp_path / "model")
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": SHOW}))
    (path / "special_tokens_map.json").write_text(json.dumps(older))
    assert render_chat(load_tokenizer(path), HELLO) == expected
    kept = {"pad_token": "x"}  # as in transformers, a caller's value counts
    assert "pad_token=x;" in render_chat(load_tokenizer(path), HELLO, chat_template_kwargs=kept)


def test_sentencepiece_and_gguf_files_name_special_tokens_too(directories):
    own = "bos_token=<s>;eos_token=</s>;unk_token=<unk>;"
    assert render_chat(load_tokenizer(directories["sentencepiece"]), HELLO, chat_template=SHOW) == own
    ids = {"unknown_token_id": 2**32 - 1, "padding_token_id": 588, "mask_token_id": 587, "seperator_token_id": 10**6}
    for name, others in (("gpt-2", "eos_token=<|im_end|>;pad_token=<|im_end|>;mask_token=<|begin|>;"), ("llama", None)):
        values = metadata(name, **ids if others else {"padding_token_id": 0})
        values.pop("tokenizer.ggml.bos_token_id", None)
        found = render_chat(gguf_tokenizer(values, "small.gguf"), HELLO, chat_template=SHOW)
        assert found == (others or f"{own}pad_token=<unk>;")


def test_more_names_for_a_template_replace_none_of_its_own(render):
    assert render("{{ a.b[0] }}{{ documents[0] }}", chat_template_kwargs={"a": {"b": [1]}, "documents": [2]}) == "12"
    for name in ("messages", "tools", "range", "raise_exception", "namespace", "strftime_now", "bos_token"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs has '{name}', which does not come from there"):
            render("", chat_template_kwargs={name: 1})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"chat_template_kwargs": [1]}, r"chat_template_kwargs is \[1\], must be a dict"),
        ({"chat_template_kwargs": {1: 2}}, "chat_template_kwargs has key 1, must be a string"),
        ({"chat_template_kwargs": {"a": [json]}}, r"chat_template_kwargs.a\[0\] is module, must be a text, a number"),
        ({"tools": {"a": 1}}, "tools is {'a': 1}, must be a list"),
        ({"tools": [print]}, r"tools\[0\] is builtin_function_or_method, must be a dict: {\"type\": \"function\""),
        ({"tools": [{"a": {1}}]}, r"tools\[0\].a is set, must be a text, a number, a list or a dict"),
        ({"chat_template": "toll_use"}, r"chat_template is 'toll_use', must be the name of one \(default\) or a"),
        ({"chat_template": 5}, "chat_template is 5, must be the name of one"),
    ],
)
def test_arguments_of_another_form_are_refused(render, options, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        render("{{ messages[0].content }}", **options)
    assert len(str(caught.value)) < 200


def test_values_nested_without_end_are_refused(render):
    value: list = []
    value.append(value)
    with pytest.raises(ValueError, match="is nested deeper than 32 levels"):
        render("", chat_template_kwargs={"a": value})


NAMED_OTHERS = [{"name": "tool_use", "template": "{{ tools | length }} tools"}, {"name": "rag", "template": "{{ 1 }}"}]


@pytest.mark.parametrize("stored", ["list", "folder", "gguf"])
def test_templates_have_names(directories, tmp_path, stored):
    named = {entry["name"]: entry["template"] for entry in NAMED_OTHERS}
    if stored == "gguf":
        tokenizer = gguf_tokenizer(
            metadata("gpt-2") | {f"tokenizer.chat_template.{n}": t for n, t in named.items()}, "f"
        )
    else:
        path = shutil.copytree(directories["llama-like"], tmp_path / "model")
        if stored == "list":
            (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": NAMED_OTHERS}))
        else:
            (path / "additional_chat_templates").mkdir()
            for name, template in named.items():
                (path / "additional_chat_templates" / f"{name}.jinja").write_text(template)
        tokenizer = load_tokenizer(path)
    assert tokenizer.chat_template is None
    with pytest.raises(ValueError, match=r"no chat template is named 'default'; chat_template= takes one of .*'rag'"):
        render_chat(tokenizer, HELLO)
    assert render_chat(tokenizer, HELLO, chat_template="rag") == "1"
    assert render_chat(tokenizer, HELLO, tools=TOOLS) == "1 tools"
    assert render_chat(tokenizer, HELLO, tools=TOOLS, chat_template="{{ 2 }}") == "2"
    with pytest.raises(
        ValueError, match=r"chat_template is 'default', must be the name of one \(.*rag.*\) or a Jinja text"
    ):
        render_chat(tokenizer, HELLO, chat_template="default")
