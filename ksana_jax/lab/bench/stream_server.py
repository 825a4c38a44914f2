"""Many streams over HTTP: a server in this process, and a client in another that only counts events."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ksana_jax import AsyncLLM

_CLIENT = Path(__file__).with_name("stream_client.py")
_TIMEOUT_S = 120.0


class StreamClient:
    """A process that reads streams, see `stream_client`; it runs until `close`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-ISu", _CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def read(self, port: int, bodies: list[str]) -> dict[str, float]:
        """Posts requests for streamed completions at once and reads the answers; returns the client's figures.

        Raises:
          RuntimeError: a stream was cut, or was silent for two minutes.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {"port": port, "path": "/v1/completions", "bodies": bodies, "timeout_s": _TIMEOUT_S}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "the client has ended"}')
        if "error" in answer:
            raise RuntimeError(f"streams over HTTP: {answer['error']}")
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


async def read_over_http(llm: AsyncLLM, client: StreamClient, prompts: list[np.ndarray], max_tokens: int) -> Any:
    """Serves greedy completions of token ids to a client, on the running event loop.

    Returns:
      The client's figures, and loop_cpu_s: CPU time of the event loop's thread meanwhile.
    """
    from ksana_jax.serve.server.app import make_app
    from ksana_jax.serve.server.running import http_server, listen
    from ksana_jax.serve.server.settings import ServerSettings

    settings = ServerSettings(port=0, max_num_queued_tokens=2**31 - 1)
    listener = listen(settings)
    server = http_server(make_app(llm, settings), settings)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    fields = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    bodies = [json.dumps({"prompt": ids.tolist(), **fields, **usage}) for ids in prompts]
    try:
        began = time.thread_time()
        found = await asyncio.to_thread(client.read, listener.getsockname()[1], bodies)
        return found | {"loop_cpu_s": time.thread_time() - began}
    finally:
        server.should_exit = True
        await serving
