"""Serves a peer over standard input and output, one JSON object a line. Runs in the peers' environment.

    python worker.py SCRIPT CLASS

Each line is {"call": METHOD, "arguments": {...}}, the first one {"call": "", ...} with the arguments of the class. The
answer is {"result": ..., "seconds": ...}; for the first one the result is `versions()`. A failure is answered by
{"error": ...}. The methods `prepare` and `finish` of a peer that has them are called around each call, and not timed.
Output of libraries goes to standard error.
"""

import importlib
import json
import os
import sys
import time


def main() -> None:
    script, name = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    peer = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if peer is None:
                peer = getattr(importlib.import_module(script), name)(**asked["arguments"])
                answer = {"result": peer.versions()}
            else:
                getattr(peer, "prepare", _nothing)()
                began = time.perf_counter()
                result = getattr(peer, asked["call"])(**asked["arguments"])
                answer = {"result": result, "seconds": time.perf_counter() - began}
                getattr(peer, "finish", _nothing)()
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _nothing() -> None:
    pass


if __name__ == "__main__":
    main()
