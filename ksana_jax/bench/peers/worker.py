"""Serves a peer over standard input and output, one JSON object a line. Runs in the peers' environment.

    python worker.py SCRIPT CLASS

The first line has the arguments of the class: model, dtype, threads, rows, max_model_len; the answer is {"versions":
...}. Each further line is {"prompts": [[id, ...], ...], "lengths": [...]}; the answer is {"seconds": ..., "token_ids":
[...]}, with the time of greedy decoding, EOS ignored. Whatever fails is answered by {"error": ...}. All that libraries
print goes to standard error.
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
                peer = getattr(importlib.import_module(script), name)(**asked)
                answer = {"versions": peer.versions()}
            else:
                prepare, finish = getattr(peer, "prepare", _nothing), getattr(peer, "finish", _nothing)
                prepare()
                began = time.perf_counter()
                token_ids = peer.generate(asked["prompts"], asked["lengths"])
                seconds = time.perf_counter() - began
                finish()
                answer = {"seconds": seconds, "token_ids": token_ids}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _nothing() -> None:
    pass


if __name__ == "__main__":
    main()
