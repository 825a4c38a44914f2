"""Chat templates that are built to waste time or memory are refused, and the next ones are rendered."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ksana_jax.tokenizers import ChatTemplateError, template_process, template_sandbox


def again(statement, start="aa", times=60):
    """A template that does something to ns.x over and over."""
    loop = "{% for i in range(" + str(times) + ") %}{% set ns.x = " + statement + " %}{% endfor %}"
    return "{% set ns = namespace(x='" + start + "') %}" + loop + "{{ ns.x }}"


def turns(body, before="", times=100_000):
    """A template that does something ten thousand million times."""
    loop = "{% for i in range(" + str(times) + ") %}"
    return "{% set x = 'a' * 1000000 %}" + before + loop * 2 + body + "{% endfor %}" * 2


WASTEFUL = {
    "~": again("ns.x ~ ns.x"),
    "join": again("[ns.x, ns.x] | join(ns.x)"),
    "join of a generator": "{{ [1] * 9000 | map('string') | join('b' * 1000000) }}",
    "str.join": again("ns.x.join([ns.x, ns.x])"),
    "replace": again("ns.x | replace('a', ns.x)"),
    "str.replace": again("ns.x.replace('a', ns.x)"),
    "set blocks": "{% set x = 'aaaa' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "text in a loop": turns("{% set y %}" + "y" * 60_000 + "{% endset %}"),
    "text in a macro": "{% macro m() %}" + "y" * 60_000 + "{% endmacro %}" + turns("{% set y = m() %}"),
    "one list in another": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "lists compared": "{% set x = [1] %}{% set y = [1] %}"
    + "{% set x = [x, x] %}{% set y = [y, y] %}" * 60
    + "{{ x == y }}",
    "namespaces": "{% set a = namespace() %}" + "{% set a = namespace(x=[a, a]) %}" * 30 + "{{ a }}",
    "texts kept": turns("{% set ns.l = ns.l + [x ~ i] %}", "{% set ns = namespace(l=[]) %}"),
    "slices kept": turns("{% set ns.l = ns.l + [x[1:]] %}", "{% set ns = namespace(l=[]) %}"),
    "loops over text": "{% set s = 'a' * 100000 %}" + "{% for i in s %}" * 3 + "{% endfor %}" * 3,
    "loops whose condition fails": turns("{% for j in range(90000) if false %}{% endfor %}"),
    "statements in a loop": turns("{%if a%}{%endif%}" * 3000),
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "blocks": "".join(
        "{% block a0 %}{{ self.a1() ~ self.a1() }}{% endblock %}".replace("a1", f"a{i + 1}").replace("a0", f"a{i}")
        for i in range(60)
    )
    + "{% block a60 %}x{% endblock %}",
    "integers": turns("{% set ns.n = ns.n * ns.n %}", "{% set ns = namespace(n=2**60) %}", times=30),
    "hexadecimal digits": "{{ ('f' * 1000000) | int(base=16) }}",
    "round": turns("{% set y = i | round(1000000, 'ceil') %}"),
    "wordwrap": "{{ ('a' * 1000000) | wordwrap(1) }}",
    "pprint": "{{ ([1] * 600000) | pprint }}",
    "expandtabs": "{{ ('\t' * 1000000).expandtabs(1000000) }}",
    "indent": "{{ ('x\n' * 100000) | indent(1000000) }}",
    "format": "{{ ('{0}' * 100000).format('a' * 1000000) }}",
    "percent": "{{ ('%9999d' * 10000) | format(1) }}",
    "json": "{% set x = [] %}" + "{% set x = [x] %}" * 300 + "{{ x | tojson(indent=100000) }}",
    "ljust": turns("{% set y = 'a'.ljust(1000000) %}"),
    "characters of a text": turns("{% set y = ('漢' * 1000000) | list %}"),
    "sort": turns("{% set y = x | sort %}"),
    "title": turns("{% set y = x | title %}"),
    "rfind": turns("{% set y = x.rfind('b' + 'a' * 400000) %}"),
    "strip": turns("{% set y = x.strip('b' * 400000 + 'a') %}"),
    "find in": turns("{% set y = (x ~ 'b') in x %}"),
    "split": turns("{% set y = ('漢 ' * 500000).split() %}"),
    "sum of lists": "{{ ([[1, 1]] * 90000) | sum(start=[]) }}",
    "call blocks": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 60
    + "x"
    + "{% endcall %}" * 60,
    "messages": turns("{% for m in messages %}{{ m.content | trim }}{% endfor %}"),
}


@pytest.mark.parametrize("kind", WASTEFUL)
def test_a_template_that_wastes_time_or_memory_is_refused(render, kind):
    began = time.monotonic()
    with pytest.raises(ChatTemplateError, match="chat template refused"):
        render(WASTEFUL[kind])
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("kind", ["~", "set blocks", "texts kept", "slices kept"])
def test_a_template_that_wastes_memory_gets_little(render, monkeypatch, kind):
    monkeypatch.setattr(template_process, "CPU_S", 20.0)
    with pytest.raises(ChatTemplateError, match="it takes more than 512 MB of memory"):
        render(WASTEFUL[kind])


def test_long_conversations_are_far_from_the_limits(render, monkeypatch):
    monkeypatch.setattr(template_process, "CPU_S", 1.0)  # half of what templates have
    template = (
        "{% set ns = namespace(last=messages|length - 1) %}{% for m in messages[::-1] %}{% if m.role == 'user' %}"
        "{% set ns.last = (messages|length - 1) - loop.index0 %}{% break %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if '</think>' in m.content %}{% set content = m.content.split('</think>')[-1] %}"
        "{% else %}{% set content = m.content | trim %}{% endif %}{% if loop.index0 > ns.last or m != messages[0] %}"
        "{{- '<|im_start|>' + m.role ~ '\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    )
    for count, length in ((5000, 100), (50, 15_000)):
        messages = [{"role": "user", "content": "x " * (length // 2)}, {"role": "assistant", "content": "y" * length}]
        assert render(template, messages * (count // 2)).count("<|im_start|>") >= count // 2


@pytest.mark.parametrize("kind", ["loops over text", "~"])
def test_a_refused_template_takes_nothing_from_the_next(render, kind):
    for _ in range(3):
        with pytest.raises(ChatTemplateError, match="it takes more than"):
            render(WASTEFUL[kind])
        assert render("{{ messages[0].content }}") == "hello"


def sandbox():
    return template_process._sandbox(template_process.CPU_S, os.getpid())


def test_a_sandbox_that_ended_is_started_again(render):
    assert render("{{ 1 }}") == "1"
    sandbox()._process.kill()
    sandbox()._process.wait()
    assert render("{{ 2 }}") == "2"


def test_descriptors_of_sandboxes_that_ended_are_closed(render):
    def refused() -> set[str]:
        with pytest.raises(ChatTemplateError, match="of memory"):
            render("{{ 'a' * 10 ** 9 }}")
        return set(os.listdir("/proc/self/fd"))

    assert refused() == refused() == refused()


def test_a_process_that_was_stopped_is_replaced(render, monkeypatch):
    assert render("first") == "first"
    os.kill(sandbox()._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch, pytest.raises(ChatTemplateError, match=r"has not answered for 0\.5 s"):
        patch.setattr(template_process, "WAIT_S", 0.5)
        render("second")
    assert render("third") == "third"


def test_the_answer_to_an_interrupted_request_is_not_given_to_the_next(render, monkeypatch):
    def interrupted(process, line):
        process.stdin.write(line)
        process.stdin.flush()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(template_process, "_exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            render("first")
    assert render("second") == "second"


def test_a_forked_child_has_a_sandbox_of_its_own_and_ends():
    code = """
import os
from ksana_jax.tokenizers.template_process import render
assert render("parent", {}, None, 9) == "parent"
if os.fork() == 0:
    assert render("child", {}, None, 9) == "child"
else:
    assert os.wait()[1] == 0
assert render("both", {}, None, 9) == "both"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_requests_of_several_threads_get_their_own_answers(render):
    with ThreadPoolExecutor(8) as pool:
        texts = pool.map(lambda i: template_process.render("{{ i }}", {"i": i}, None, 9), range(100))
        assert list(texts) == [str(i) for i in range(100)]


def test_a_machine_that_allows_less_memory_gets_texts_too():
    request = json.dumps({"source": "{{ a }}", "given": {"a": "text"}, "now": None, "most": 9}).encode() + b"\n"
    command = f"ulimit -Hd 300000; exec '{sys.executable}' -P '{template_sandbox.__file__}' 1 {2**29}"
    done = subprocess.run(["bash", "-c", command], input=request, stdout=subprocess.PIPE, check=True, timeout=60)
    assert json.loads(done.stdout) == {"text": "text"}


def test_a_conversation_larger_than_the_memory_is_refused_as_such(render, monkeypatch):
    monkeypatch.setattr(template_process, "MEMORY_BYTES", 2**25)
    monkeypatch.setattr(template_process, "CPU_S", 1.0)
    template_process._sandbox.cache_clear()
    try:
        with pytest.raises(ChatTemplateError, match="it takes more than 32 MB of memory"):
            render("{{ 1 }}", [{"role": "user", "content": "x" * 2**25}])
        assert render("{{ 2 }}") == "2"
    finally:
        template_process._sandbox.cache_clear()
