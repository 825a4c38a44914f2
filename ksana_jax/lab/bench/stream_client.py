"""A client that reads many streams of a server and only counts their events. A script: it imports no ksana_jax.

    python stream_client.py

Reads from its standard input one line of JSON for each run, {"port", "path", "bodies": [...], "timeout_s"}, and answers
with one line, {"seconds", "cpu_s", "num_events", "num_tokens"}, or {"error"}. Connections are made first; seconds
last from the first request to the end of the last answer; num_tokens is the answers' usage.
"""

import json
import re
import selectors
import socket
import sys
import time

TAIL = 1024  # bytes that hold the event with the usage and the end of the answer
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


def read_streams(port: int, path: str, bodies: list[str], timeout_s: float) -> dict[str, float]:
    """Posts the bodies at once, each on a separate connection, and reads the answers to their ends."""
    connections = [socket.create_connection(("127.0.0.1", port), timeout=timeout_s) for _ in bodies]
    selector, tails, num_events = selectors.DefaultSelector(), {}, 0
    try:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, connection)
            tails[connection] = b""
        began, cpu_s = time.perf_counter(), time.process_time()
        for connection, body in zip(connections, bodies, strict=True):
            connection.sendall(_request(path, body))
        num_open = len(connections)
        while num_open:
            if not (ready := selector.select(timeout_s)):
                raise TimeoutError(f"{num_open} streams have brought nothing for {timeout_s:g} seconds")
            for key, _ in ready:
                connection = key.data
                data = connection.recv(65536)
                num_events += data.count(b"data: {")
                tail = tails[connection] = (tails[connection] + data)[-TAIL:]
                if tail.endswith(_END):
                    selector.unregister(connection)
                    num_open -= 1
                elif not data:
                    raise ConnectionError(f"a stream ended without [DONE]: {tail[-200:]!r}")
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    finally:
        selector.close()
        for connection in connections:
            connection.close()
    num_tokens = sum(int(_USAGE.findall(tail)[-1]) for tail in tails.values())
    return {"seconds": seconds, "cpu_s": cpu_s, "num_events": num_events, "num_tokens": num_tokens}


def _request(path: str, body: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode("ascii")


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            answer = read_streams(**json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
