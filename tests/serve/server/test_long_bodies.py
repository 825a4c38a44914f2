"""The worst bodies that a server reads: other requests do not wait for them."""

import asyncio
import gc
import json
import time

import pytest

from ksana_jax.serve.server.json_body import MAX_KEYS, MAX_VALUES
from ksana_jax.serve.server.settings import ServerSettings
from tests.fakes import VOCAB

# The aim is 0.05 s on a processor of the day, and each body keeps to it; a slow one may take twice as long.
MOST_S = 0.1
SIZE = ServerSettings.max_body_bytes
IDS = [i % VOCAB for i in range(MAX_VALUES - 8)]
KEYS = ",".join(f'"{key}":0' for key in range(MAX_VALUES - 8)).encode()
COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"


def body(**fields):
    return json.dumps(fields).encode()


def filled(start: bytes, part: bytes, end: bytes) -> bytes:
    """A body of nearly the size limit."""
    return start + part * ((SIZE - len(start) - len(end)) // len(part)) + end


WORST = {
    "ids that end the output": (COMPLETIONS, body(prompt="a", max_tokens=2, stop_token_ids=IDS), 200),
    "ids that end 64 outputs": (COMPLETIONS, body(prompt="a", n=64, max_tokens=1, stop_token_ids=IDS), 200),
    "ids that are allowed": (COMPLETIONS, body(prompt="a", max_tokens=2, allowed_token_ids=IDS), 200),
    "ids of which the last is wrong": (COMPLETIONS, body(prompt="a", stop_token_ids=[*IDS, 0.5]), 400),
    "ids written as floats": (COMPLETIONS, body(prompt="a", max_tokens=2, stop_token_ids=list(map(float, IDS))), 200),
    "floats for ids": (COMPLETIONS, body(prompt=[0.5] * (MAX_VALUES - 8)), 400),
    "a prompt of ids": (COMPLETIONS, body(prompt=IDS), 400),
    "prompts of ids": (COMPLETIONS, body(prompt=[IDS[:250]] * 1024), 400),
    "an escaped text": (COMPLETIONS, filled(b'{"prompt":"', b"\\u00e9", b'"}'), 400),
    "many keys": (COMPLETIONS, b"{" + KEYS + b"}", 400),
    "many keys, and one twice": (COMPLETIONS, b"{" + KEYS + b',"%d":1}' % (MAX_VALUES - 9), 400),
    "many empty lists": (COMPLETIONS, body(prompt=[[]] * (MAX_VALUES - 8)), 400),
    "many objects": (COMPLETIONS, filled(b'{"prompt":[', b'{"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa":1},', b"0]}"), 400),
    "a chat's ids": (CHAT, body(messages=[{"role": "user", "content": "a"}], max_tokens=2, stop_token_ids=IDS), 200),
    "a message of many parts": (
        CHAT,
        body(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * (MAX_VALUES // 2 - 8)}]),
        400,
    ),
    "many calls of tools": (
        CHAT,
        body(
            messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * (MAX_VALUES - 8)}],
            max_tokens=2,
        ),
        400,
    ),
    "as many calls of tools as are read": (
        CHAT,
        body(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * (MAX_KEYS // 2 - 8)}]),
        200,
    ),
    "as many parts as are read, the last one wrong": (
        CHAT,
        body(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * (MAX_KEYS // 2 - 8) + [1]}]),
        400,
    ),
    "as many wrong biases as are read": (
        COMPLETIONS,
        body(prompt="a", logit_bias={i: "a" for i in range(MAX_KEYS - 8)}),
        400,
    ),
    "a long text": (TOKENIZE, filled(b'{"prompt":"', b"a", b'"}'), 400),
    "ids to detokenize": (DETOKENIZE, body(tokens=IDS), 200),
}


@pytest.fixture
def others_frozen():
    """Keeps the collector from scanning other tests' objects during a measurement."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def lag_of(served, path: str, sent: bytes, status: int) -> float:
    """The longest time that the event loop needs for a wait of a millisecond while a body is read and answered."""
    lags, ends = [], asyncio.Event()

    async def look():
        while not ends.is_set():
            # Processor time of this process: what others take of the machine's does not count.
            began_s = time.process_time()
            await asyncio.sleep(0.001)
            lags.append(time.process_time() - began_s)

    loop = served.running._loop
    looking = asyncio.run_coroutine_threadsafe(look(), loop)
    reply = served.ask("POST", path, sent)
    loop.call_soon_threadsafe(ends.set)
    looking.result(10)
    assert reply.status == status, reply.body[:300]
    return max(lags)


def parsing_s(sent: bytes) -> float:
    """Seconds of the parser alone, which nothing interrupts: 0.02 to 0.06 for the most empty lists, more when all
    processors are busy."""
    began_s = time.process_time()
    json.loads(sent)
    return time.process_time() - began_s


@pytest.mark.parametrize("name", WORST)
def test_the_event_loop_runs_while_the_worst_body_is_read(served, others_frozen, name):
    path, sent, status = WORST[name]
    assert len(sent) <= SIZE
    # The engine's and this client's threads take processor time as well, now and then at the same moment.
    assert any(lag_of(served, path, sent, status) < max(MOST_S, 3 * parsing_s(sent)) for _ in range(3))
