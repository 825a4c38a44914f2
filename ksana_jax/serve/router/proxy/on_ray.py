"""Starts `ksana serve` in a Ray cluster, one actor for each server, for `ksana route --spawn N MODEL --on ray`.

Ray places the servers and reports their deaths. Requests do not pass through it: the actor starts a server on its
node and tells the address, and the proxy speaks HTTP with it as with any other. So there is one protocol for streams,
aborts, events and health, the server's limits hold, and a request costs no call of an actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ksana_jax.engine.distributed.ray_connection import connected
from ksana_jax.serve.router.proxy.launching import EndedServer
from ksana_jax.serve.router.proxy.spawning import STOP_S, die_with_parent, ended_with, free_port, serve_command

# Seconds between looks whether a server still runs, and for a node to start an actor.
LOOK_S, START_S = 0.5, 300.0


class ServerActor:
    """A server on the node where Ray has placed this actor.

    Args:
      host: the address on which it listens; None takes the node's own.
    """

    def __init__(self, model: str, settings: Sequence[str], key: str, shutdown_timeout_s: float, host: str | None):
        import ray  # pyright: ignore[reportMissingImports]

        self._host = host or ray.util.get_node_ip_address()
        self._folder = tempfile.TemporaryDirectory(prefix="ksana-route-")
        key_file = Path(self._folder.name) / "key"
        key_file.write_text(key + "\n")  # in a folder that only this user can read
        self._port, self._stop_s = free_port(self._host), shutdown_timeout_s + STOP_S
        command = serve_command(model, settings, key_file, shutdown_timeout_s, self._host)
        self._process = subprocess.Popen(
            [*command, "--port", str(self._port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=die_with_parent,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def url(self) -> str:
        """Returns the address of the server, at which it may not answer yet."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def look(self) -> tuple[int | None, list[str]]:
        """Returns the server's exit code, None while it runs, and the lines that it has written since the last look."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(1.0)
        lines, self._lines = self._lines, []
        return code, lines

    def stop(self) -> None:
        """Ends the server in good order, or by force if it takes too long."""
        self._process.terminate()
        try:
            self._process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip()[:2000])


class RayLauncher:
    """See `launching.Launcher`.

    Args:
      ray: the connected module. arguments: of `ServerActor`. resources: of each actor, as Ray's options.
      show: takes the lines that a server writes, each after its number.
    """

    def __init__(self, ray: Any, arguments: Sequence[Any], resources: dict[str, Any], show: Callable[[str], None]):
        self._ray, self._arguments, self._show = ray, arguments, show
        self._actor = ray.remote(max_restarts=0, **resources)(ServerActor)
        self._actors: dict[int, Any] = {}

    async def start(self, index: int) -> str:
        """See `Launcher`."""
        actor = self._actors[index] = self._actor.remote(*self._arguments)
        return await asyncio.wait_for(actor.url.remote(), START_S)

    async def ended(self, index: int) -> EndedServer:
        """See `Launcher`. A server also ends when its actor or node dies."""
        last = ""
        while True:
            try:
                code, lines = await self._actors[index].look.remote()
            except self._ray.exceptions.RayError as error:
                return EndedServer(f"the actor has died: {type(error).__name__}")
            for last in lines:
                self._show(f"[server {index}] {last}")
            if code is not None:
                self._ray.kill(self._actors[index])
                return ended_with(code, last)
            await asyncio.sleep(LOOK_S)

    async def stop(self, index: int) -> None:
        """See `Launcher`."""
        actor = self._actors.get(index)
        if actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                await actor.stop.remote()


@contextlib.contextmanager
def ray_launcher(
    address: str, arguments: Sequence[Any], resources: dict[str, Any], show: Callable[[str], None]
) -> Iterator[RayLauncher]:
    """Connects to a cluster, or starts one of this machine ("local"), while the context is open.

    Raises:
      ConfigError: Ray is not installed, or no cluster answers.
    """
    with connected(address) as ray:
        yield RayLauncher(ray, arguments, resources, show)
