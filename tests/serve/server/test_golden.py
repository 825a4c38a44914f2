"""Streams byte by byte: transcripts in golden/, read again in pieces that end at every byte.

`python -m tests.serve.server.test_golden` writes the transcripts anew.
"""

import asyncio
import re
from pathlib import Path

import openai._streaming
import pytest

from ksana_jax.serve.server.app import make_app
from ksana_jax.serve.server.settings import ServerSettings
from tests.serve.server.in_process import Scripted, ask, output, piece
from tests.serve.server.serving import Letters, make_llm

GOLDEN = Path(__file__).parent / "golden"
AB, HI, CAFE = (Letters().encode(text) for text in ("ab", "Hi", "é!"))
MESSAGES = [{"role": "user", "content": "hi"}]
USAGE = {"include_usage": True}
h, i = HI
SCORES = [{h: -0.1, i: -2.5}, {i: -0.25, h: -1.5}]

# Each: path, fields of the request, and what the engine returns.
SCRIPTS = {
    "completion": (
        "/v1/completions",
        {"prompt": "ab", "stream": True},
        [output(piece("H", [h])), output(piece("i", [i])), output(piece("", [0], ends="stop"))],
    ),
    "completion_usage": (
        "/v1/completions",
        {"prompt": "ab", "stream": True, "stream_options": {"continuous_usage_stats": True}},
        [output(piece("H", [h]), cached=1), output(piece('"\n\u2028é', [i, i], ends="length"), cached=1)],
    ),
    "completion_echo_logprobs": (
        "/v1/completions",
        {"prompt": "ab", "stream": True, "echo": True, "logprobs": 2},
        [
            output(piece("H", [h], scores=SCORES[:1]), prompt_ids=AB, prompt_scores=[{AB[1]: -0.5, h: -0.75}]),
            output(piece("i", [i], ends="length", scores=SCORES[1:]), prompt_ids=AB, prompt_scores=[]),
        ],
    ),
    # The first half of é has no text yet, and gives no chunk.
    "completion_split_character": (
        "/v1/completions",
        {"prompt": "ab", "stream": True},
        [output(piece("", CAFE[:1])), output(piece("é", CAFE[1:2])), output(piece("!", CAFE[2:], ends="length"))],
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "stream": True, "stream_options": USAGE},
        [output(piece("H", [h])), output(piece("i", [i], ends="stop"))],
    ),
    "chat_n_logprobs": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "stream": True, "n": 2, "logprobs": True, "top_logprobs": 2, "stream_options": USAGE},
        [
            output(piece("H", [h], 0, scores=SCORES[:1]), piece("", [], 1)),
            output(piece("i", [i], 0, "stop", scores=SCORES[1:]), piece("Hi", HI, 1, scores=SCORES)),
            output(piece("", [], 0, "stop"), piece("", [], 1, "length")),
        ],
    ),
    "chat_failed": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "stream": True},
        [output(piece("H", [h])), output(piece("", [], ends="error", error="scores are not finite"))],
    ),
    "chat_aborted": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "stream": True, "stream_options": USAGE},
        [output(piece("H", [h])), output(piece("", [], ends="abort"))],
    ),
}


def transcript(name: str) -> list[bytes]:
    """The writes of a stream, with constants in the place of id, time and fingerprint."""
    path, fields, script = SCRIPTS[name]
    return [constant(write) for write in writes_of(path, fields, script)]


def writes_of(path: str, fields: dict, script: list, **settings) -> list[bytes]:
    async def main():
        llm, stream = make_llm(), Scripted(script)

        async def submit_all(prompts, params, ids, **settings):
            return [stream]

        llm.submit_all = submit_all
        try:
            status, headers, writes = await ask(make_app(llm, ServerSettings(**settings)), path, fields)
        finally:
            await llm.aclose()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
        assert stream.closed
        return writes

    return asyncio.run(main())


def constant(data: bytes) -> bytes:
    data = re.sub(rb'"id":"(\w+)-[0-9a-f]{32}"', rb'"id":"\1-7"', data)
    data = re.sub(rb'"created":\d+', b'"created":1', data)
    return re.sub(rb'"fp_[0-9a-f]{16}"', b'"fp_0"', data)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_is_its_transcript(name):
    assert b"".join(transcript(name)) == (GOLDEN / f"{name}.txt").read_bytes()


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_write_has_whole_events(name):
    for write in transcript(name):
        assert write.endswith(b"\n\n") and write.startswith((b"data: ", b": ping"))


def test_a_comment_is_written_while_nothing_else_is():
    path, fields, [first, *others] = SCRIPTS["completion"]
    writes = writes_of(path, fields, [first, 0.2, *others], ping_s=0.02)
    assert writes[1] == b": ping\n\n" and writes[0].startswith(b"data: ")
    assert events(writes) == events([write for write in writes if write != b": ping\n\n"])


def events(pieces: list[bytes]) -> list[str]:
    """Data of the events as a browser reads them, https://html.spec.whatwg.org section 9.2; CR is not handled."""
    found, data, buffer = [], [], b""
    for part in pieces:
        buffer += part
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").removeprefix(b" ").decode())
            elif not line and data:
                found.append("\n".join(data))
                data = []
    assert not buffer and not data, "the stream ends within an event"
    return found


def openai_events(pieces: list[bytes]) -> list[str]:
    return [found.data for found in openai._streaming.SSEDecoder().iter_bytes(iter(pieces)) if found.data]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("parse", [events, openai_events], ids=["as browsers", "as openai"])
def test_pieces_may_end_at_every_byte(name, parse):
    whole = (GOLDEN / f"{name}.txt").read_bytes()
    expected = parse([whole])
    assert expected[-1] == "[DONE]" and len(expected) == whole.count(b"data: ")
    assert parse([bytes([byte]) for byte in whole]) == expected
    for at in range(1, len(whole)):
        assert parse([whole[:at], whole[at:]]) == expected


if __name__ == "__main__":
    for name in SCRIPTS:
        (GOLDEN / f"{name}.txt").write_bytes(b"".join(transcript(name)))
