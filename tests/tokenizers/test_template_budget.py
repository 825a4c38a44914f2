"""Chat templates that are built to waste time or memory are refused before they have wasted much."""

import time
import tracemalloc

import pytest

from ksana_jax.tokenizers import ChatTemplateError


def again(statement, start="aa", times=60):
    """A template that does something to ns.x over and over."""
    loop = "{% for i in range(" + str(times) + ") %}{% set ns.x = " + statement + " %}{% endfor %}"
    return "{% set ns = namespace(x='" + start + "') %}" + loop + "{{ ns.x }}"


def turns(body, before="", times=100_000):
    """A template that does something a hundred thousand times."""
    return "{% set x = 'a' * 1000000 %}" + before + "{% for i in range(" + str(times) + ") %}" + body + "{% endfor %}"


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
    "a namespace in itself": "{% set a = namespace() %}{% set a.x = [a] %}{{ a }}",
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
    "round": turns("{% set y = 1 | round(1000000, 'ceil') %}"),
    "wordwrap": "{{ ('a' * 1000000) | wordwrap(1) }}",
    "pprint": "{{ ([1] * 60000) | pprint }}",
    "expandtabs": "{{ ('\t' * 1000000).expandtabs(1000000) }}",
    "indent": "{{ ('x\n' * 100000) | indent(1000000) }}",
    "format": "{{ ('{0}' * 100000).format('a' * 1000000) }}",
    "percent": "{{ ('%9999d' * 10000) | format(1) }}",
    "strftime": "{{ strftime_now('%9999d' * 10000) }}",
    "json": "{{ [[]] | tojson(indent=1000) }}",
    "ljust": turns("{% set y = 'a'.ljust(1000000) %}"),
    "characters of a text": turns("{% set y = ('漢' * 1000000) | list %}"),
    "sort": turns("{% set y = x | sort %}"),
    "title": turns("{% set y = ('a-' * 500000) | title %}"),
    "rfind": turns("{% set y = x.rfind('b' + 'a' * 400000) %}"),
    "strip": turns("{% set y = x.strip('b' * 400000 + 'a') %}"),
    "find in": turns("{% set y = (x ~ 'b') in x %}"),
    "split": turns("{% set y = ('漢 ' * 500000).split() %}"),
    "sum of lists": "{{ ([[1, 1]] * 9000) | sum(start=[]) }}",
    "call blocks": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 60
    + "x"
    + "{% endcall %}" * 60,
    "messages": turns("{% for m in messages %}{{ m.content | trim }}{% endfor %}"),
}


@pytest.mark.parametrize("kind", WASTEFUL)
def test_a_template_that_wastes_time_or_memory_is_refused(render, kind):
    began = time.process_time()
    with pytest.raises(ChatTemplateError, match="chat template refused"):
        render(WASTEFUL[kind])
    assert time.process_time() - began < 4  # 2 s here, of the slowest (title)


@pytest.mark.parametrize("kind", ["~", "set blocks", "texts kept", "slices kept", "characters of a text", "split"])
def test_a_template_that_wastes_memory_gets_little(render, kind):
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError):
            render(WASTEFUL[kind])
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_long_conversations_are_far_from_the_limits(render):
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


def test_a_refused_template_takes_nothing_from_the_next(render):
    for _ in range(3):
        with pytest.raises(ChatTemplateError, match="more than 20,000,000 units of work"):
            render(WASTEFUL["loops over text"])
        assert render("{{ messages[0].content }}") == "hello"
