"""`ksana route` and `ksana serve` with wrong arguments: one line that says what to change, and exit code 2."""

import asyncio
import re
import socket
from types import SimpleNamespace

import pytest

from ksana_jax.cli.options import read_template
from ksana_jax.serve.router.proxy import spawning
from ksana_jax.serve.router.proxy.models import SameModel
from tests.serve.router.proxy.harness import scene

NOBODY = "http://127.0.0.1:9"
SERVERS = ("--servers", NOBODY)
SPAWN = ("--spawn", "2", "ksana-tiny")

ROUTE = {
    "no servers": ((), "give either --servers with their addresses, or --spawn with a number and a model"),
    "both kinds": ((*SERVERS, *SPAWN), "give either --servers"),
    "no address": (("--servers", "foo:bar"), "server is 'foo:bar', must be an address such as http://127.0.0.1:8001"),
    "a path": (("--servers", f"{NOBODY}/v1"), f"server is '{NOBODY}/v1', must be an address"),
    "one twice": (("--servers", f"{NOBODY}/,127.0.0.1:9"), f"server {NOBODY} is given twice"),
    "policy": ((*SERVERS, "--policy", "min_tft"), "there is no policy 'min_tft'; the nearest of"),
    "port": ((*SERVERS, "--port", "99999"), "port is 99,999, must be an integer from 0 to 65,535"),
    "keys absent": ((*SERVERS, "--api-key-file", "nofile"), "API keys cannot be read from nofile: No such file"),
    "no key": ((*SERVERS, "--api-key-file", "/dev/null"), "/dev/null has no API key: write one a line"),
    "tokenizer": ((*SERVERS, "--tokenizer", "nomodel"), "there is no model 'nomodel'; supported: "),
    "settings of servers of others": ((*SERVERS, "block_size=8"), "--spawn needs a number of servers, from 1, and a"),
    "spawn without a model": (("--spawn", "2"), "--spawn needs a number of servers, from 1, and a model"),
    "no servers to start": (("--spawn", "0", "ksana-tiny"), "--spawn needs a number of servers, from 1, and a model"),
    "servers that are none": (("--spawn", "4-2", "ksana-tiny"), "servers are '4-2', must be a number from 1"),
    "Ray resources": (
        (*SERVERS, "--ray-resources", "{num_cpus: 2}"),
        "--ray-resources needs --spawn, which",
    ),
    "Ray without servers": ((*SERVERS, "--ray-address", "a:1"), "--ray-address needs --spawn, which starts"),
    "no host": ((*SERVERS, "--host", ""), "host is '', must be an address to listen on"),
    "blocks of no tokens": ((*SERVERS, "--block-size", "0"), "block_size is 0"),
    "option": ((*SERVERS, "--polcy", "x"), "ksana route has no option --polcy; options of ksana serve follow"),
    "option of serve": ((*SPAWN, "--client-timeot", "6"), "ksana serve: No such option"),
    "value of serve": ((*SPAWN, "--max-num-queued-reqs", "many"), "ksana serve: Invalid value for '--max-num-queued"),
    "no setting": ((*SPAWN, "block_size"), "'block_size' is not an override: write key=value"),
}

SERVE = {
    "port": (("--port", "99999"), "port is 99,999, must be an integer from 0 to 65,535"),
    "host": (("--host", "256.0.0.1", "--port", "0"), "cannot listen on 256.0.0.1 port 0: "),
    "no host": (("--host", ""), "host is '', must be an address to listen on"),
    "keys absent": (("--api-key-file", "nofile"), "API keys cannot be read from nofile: No such file"),
    "template": (("--chat-template", "nofile"), "the chat template cannot be read from nofile: No such file"),
    "setting": (("block_size",), "'block_size' is not an override: write key=value"),
}


def error_of(run_ksana, *arguments):
    code, _, error = run_ksana(*arguments)
    [line] = error.splitlines()
    assert code == 2
    return line.removeprefix("ksana: error: ")


@pytest.mark.parametrize("name", ROUTE)
def test_wrong_arguments_of_route_are_told_in_a_line(run_ksana, name):
    arguments, told = ROUTE[name]
    assert error_of(run_ksana, "route", *arguments).startswith(told)


@pytest.mark.parametrize("name", SERVE)
def test_wrong_arguments_of_serve_are_told_in_a_line(run_ksana, name):
    arguments, told = SERVE[name]
    assert error_of(run_ksana, "serve", "ksana-tiny", *arguments).startswith(told)


def test_a_chat_template_that_is_no_text_is_named(run_ksana, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_bytes(b"{{ a \xff")
    expected = f"the chat template cannot be read from {path}: byte 5 is not UTF-8"
    assert error_of(run_ksana, "serve", "ksana-tiny", "--chat-template", path) == expected


def test_the_servers_chat_template_is_a_file_a_text_or_a_name(monkeypatch, run_ksana, tmp_path):
    named = {"rag": "{{ documents }}", "tool_use": "{{ tools }}"}
    monkeypatch.setattr("ksana_jax.tokenizers.find_tokenizer", lambda model: SimpleNamespace(chat_templates=named))
    (path := tmp_path / "template.jinja").write_text("{{ messages }}")
    for given, source in ((path, "{{ messages }}"), ("{{ 1 }}", "{{ 1 }}"), ("rag", "{{ documents }}")):
        assert read_template("a model", str(given)) == source
    told = error_of(run_ksana, "serve", "ksana-tiny", "--chat-template", "tools")
    assert told.endswith("; the model's templates are rag, tool_use")


@pytest.mark.parametrize("command", [("serve", "ksana-tiny"), ("route", *SERVERS)], ids=lambda words: words[0])
def test_a_port_in_use_is_told_in_a_line(run_ksana, command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expected = f"cannot listen on 127.0.0.1 port {port}: Address already in use"
        assert error_of(run_ksana, *command, "--port", port) == expected


async def test_servers_of_two_models_are_refused():
    async with scene(3) as s:
        s.fakes[1].model = "other"
        with pytest.raises(ValueError, match="servers must serve the same model: other on ") as caught:
            await SameModel(s.proxy).check()
        names = [url.partition("://")[2] for url in (s.fakes[1].url, s.fakes[0].url)]
        assert str(caught.value).endswith(f"other on {names[0]}, fake on {names[1]}")


def test_a_server_that_does_not_answer_is_named_with_the_reason():
    async def main():
        async with scene(0) as s:
            return (await s.fleet.add(NOBODY)).trouble

    assert re.fullmatch("Connection refused", asyncio.run(main()))


@pytest.mark.parametrize(
    ("code", "last", "why"),
    [
        (-9, "x", "killed by SIGKILL"),
        (2, "ksana: error: no such model", "no such model"),
        (1, "ZeroDivisionError", "exit code 1: ZeroDivisionError"),
        (3, "", "exit code 3"),
    ],
)
def test_a_servers_end_is_told_by_its_last_line(code, last, why):
    assert spawning.why_ended(code, last) == why
