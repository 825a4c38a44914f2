"""Chat templates over HTTP: clients may send none, and one that a model brings cannot harm the server."""

import os
import threading

import pytest

from tests.serve.server.serving import TEMPLATE, make_llm, serving
from tests.serve.server.test_connections import expected
from tests.tokenizers.test_chat import REFUSED

MESSAGES = [{"role": "user", "content": "hi"}]
# Ways to the interpreter, long texts, and what is no template.
HOSTILE = [
    "{{ cycler.__init__.__globals__.os.popen('touch ESCAPED').read() }}",
    "{{ self.__init__.__globals__.__builtins__.open('ESCAPED', 'w') }}",
    *REFUSED[::2],
]


@pytest.fixture(scope="module")
def slow():
    with serving(make_llm(slow_s=0.01)) as server:
        yield server


def test_templates_of_a_model_that_do_harm_are_refused_while_a_stream_runs_on(slow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, tokenizer = [], slow.llm.tokenizer

    def read() -> None:
        while not ended.is_set():
            found.append(slow.post("/v1/completions", prompt="canary", max_tokens=60, temperature=0, stream=True))

    ended, thread = threading.Event(), threading.Thread(target=read)
    thread.start()
    try:
        for template in HOSTILE:
            monkeypatch.setattr(tokenizer, "chat_template", template, raising=False)
            for path in ("/v1/chat/completions", "/tokenize"):
                reply = slow.post(path, messages=MESSAGES)
                assert (reply.status, reply.error["param"]) == (400, "messages"), (template, reply.body)
                assert reply.error["message"].startswith("chat template refused: ") and len(reply.body) < 1000
                assert b"Traceback" not in reply.body
            assert slow.ask("GET", "/health").status == 200
    finally:
        ended.set()
        thread.join(30)
    assert os.listdir(tmp_path) == []
    for reply in found:
        assert "".join(event["choices"][0]["text"] for event in reply.events) == expected("canary", 60)
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE, raising=False)
    assert slow.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1).status == 200


@pytest.mark.parametrize("template", ["{{ messages }}", HOSTILE[0], TEMPLATE])
def test_templates_of_clients_are_refused_unread(slow, monkeypatch, template):
    rendered = []
    monkeypatch.setattr("ksana_jax.tokenizers.template_sandbox.render", lambda *given: rendered.append(given))
    for path in ("/v1/chat/completions", "/tokenize"):
        reply = slow.post(path, messages=MESSAGES, chat_template=template)
        assert (reply.status, reply.error["param"]) == (400, "chat_template")
        assert reply.error["code"] == "unsupported_parameter"
    assert not rendered


@pytest.mark.parametrize("name", ["messages", "tools", "range", "raise_exception", "strftime_now", "eos_token"])
def test_clients_replace_no_name_of_a_template(slow, name):
    reply = slow.post("/tokenize", messages=MESSAGES, chat_template_kwargs={name: 1})
    assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs")


# What clients send must not make a harmless template do more than it should.
WASTED = {
    "a range without end": ("{% for i in range(a) %}{% endfor %}", {"a": 10**15}),
    "a text repeated": ("{{ 'x' * a }}", {"a": 10**9}),
    "a power": ("{{ 9 ** a }}", {"a": 10**6}),
    "a product": ("{{ a * a * a }}", {"a": 10**4000}),
    "a way out": ("{{ a.format(messages) }}", {"a": "{0.__class__.__mro__}"}),
    "squares": ("{% for x in a %}{% for y in a %}{{ a | tojson }}{% endfor %}{% endfor %}", {"a": [0] * 10_000}),
}


@pytest.mark.parametrize("case", WASTED)
def test_values_of_clients_are_within_the_limits_of_templates(slow, monkeypatch, case):
    template, values = WASTED[case]
    monkeypatch.setattr(slow.llm.tokenizer, "chat_template", template, raising=False)
    reply = slow.post("/tokenize", messages=MESSAGES, chat_template_kwargs=values)
    assert reply.status == 400, reply.body[:200]
    assert len(reply.body) < 1000 and b"Traceback" not in reply.body


@pytest.mark.parametrize("hostile", ["{{ 7 * 7 }}", "{% for i in range(10 ** 9) %}{% endfor %}", HOSTILE[0]])
def test_what_clients_write_is_text_to_the_template(slow, hostile):
    found = slow.post("/tokenize", messages=[{"role": "user", "content": hostile}]).json["tokens"]
    assert slow.post("/detokenize", tokens=found).json["prompt"] == f"u:{hostile};a:"
