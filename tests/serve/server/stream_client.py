"""A client that reads many streams of a server and only counts their tokens. A script: it imports no ksana_jax.

Reads {"port", "path", "bodies": [...], "timeout_s"} from its standard input and prints the sum of the answers' usage.
"""

import json
import re
import selectors
import socket
import sys

TAIL = 1024  # bytes that hold the event with the usage and the end of the answer
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


def read_streams(port: int, path: str, bodies: list[str], timeout_s: float) -> int:
    """Posts the bodies at once, each on a separate connection, and reads the answers to their ends."""
    connections = [socket.create_connection(("127.0.0.1", port), timeout=timeout_s) for _ in bodies]
    selector, tails = selectors.DefaultSelector(), dict.fromkeys(connections, b"")
    for connection, body in zip(connections, bodies, strict=True):
        selector.register(connection, selectors.EVENT_READ)
        connection.sendall(_request(path, body))
    num_open = len(connections)
    while num_open:
        if not (ready := selector.select(timeout_s)):
            raise TimeoutError(f"{num_open} streams have brought nothing for {timeout_s:g} seconds")
        for key, _ in ready:
            connection = key.fileobj
            data = connection.recv(65536)
            tail = tails[connection] = (tails[connection] + data)[-TAIL:]
            if tail.endswith(_END):
                selector.unregister(connection)
                num_open -= 1
            elif not data:
                raise ConnectionError(f"a stream ended without [DONE]: {tail[-200:]!r}")
    return sum(int(_USAGE.findall(tail)[-1]) for tail in tails.values())


def _request(path: str, body: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode("ascii")


if __name__ == "__main__":
    print(read_streams(**json.load(sys.stdin)))
