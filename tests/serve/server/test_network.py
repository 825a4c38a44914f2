"""Serving opens no connections: a client's is the only one."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.server.serving import TEMPLATE, Served, make_llm, serving
from tests.serve.server.test_running import said

REQUESTS = [
    ("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 4}),
    ("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 4, "stream": True, "n": 2, "logprobs": 1}),
    (
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "see http://example.com/a.png"}], "max_tokens": 4},
    ),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    ("POST", "/tokenize", {"prompt": "hi"}),
    ("POST", "/detokenize", {"tokens": [1, 2]}),
    *(("GET", path, None) for path in ("/", "/live", "/metrics", "/health", "/ready", "/version", "/v1/models")),
]
# Prints what a process asks of the network, at its end. A hook cannot be removed, and so has a process of its own.
WATCHED = """
import json, sys
ASKS = {"connect": -1, "getaddrinfo": 0, "gethostbyname": 0, "sendto": -1, "sendmsg": -1}
asked = set()

def note(event, given):
    kind = event.removeprefix("socket.")
    if event.startswith("socket.") and kind in ASKS:
        asked.add(f"{kind} {given[ASKS[kind]]}")

sys.addaudithook(note)
from ksana_jax.__main__ import main
try:
    main()
finally:
    print(json.dumps(sorted(asked)), flush=True)
"""


def ask_all(server: Served) -> None:
    for method, path, fields in REQUESTS:
        assert server.ask(method, path, fields).status == 200, path


def test_requests_make_the_server_contact_nobody(monkeypatch):
    asked = []
    with serving(make_llm()) as server:
        for name in ("connect", "connect_ex", "sendto", "sendmsg"):
            monkeypatch.setattr(socket.socket, name, noting(getattr(socket.socket, name), asked, -1))
        monkeypatch.setattr(socket, "getaddrinfo", noting(socket.getaddrinfo, asked, 0))
        ask_all(server)
    # The clients of this test connect to the server.
    assert set(asked) == {"127.0.0.1", ("127.0.0.1", server.port)}
    assert len([one for one in asked if isinstance(one, tuple)]) == len(REQUESTS)


def noting(function, found: list, which: int):
    def note(*given, **settings):
        found.append(given[which])
        return function(*given, **settings)

    return note


@pytest.mark.soak
def test_the_command_contacts_nobody_from_its_start_to_its_end(tmp_path):
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    arguments = ["serve", "ksana-tiny", "--port", "0", "--no-warm-up", "--chat-template", tmp_path / "chat.jinja"]
    command = [sys.executable, "-c", WATCHED, *arguments]
    folder = Path(__file__).parents[3]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)
    try:
        port = int(said(process, "serving ksana-tiny").strip().rpartition(":")[2])
        ask_all(Served(None, None, port, None, []))
        os.kill(process.pid, signal.SIGTERM)
        told, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert json.loads(told) == ["getaddrinfo 127.0.0.1"]  # of the address to listen on
