"""Headless Chromium, driven over its DevTools protocol with aiohttp's websockets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The background services of a browser only look for hosts that tests must not reach.
FLAGS = (
    "--headless --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-port=0"
).split()


def find_chromium() -> str | None:
    """Returns the path of a Chromium; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """A page of the browser.

    Attributes:
      problems: what the page's console has as errors or warnings, exceptions included.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket, self._number = socket, 0
        self.problems: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol; notes problems that are reported meanwhile."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            found = await self._socket.receive_json(timeout=30)
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            self._note(found)

    def _note(self, event: dict[str, Any]) -> None:
        if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
            self.problems.append(event["params"]["entry"]["text"])
        elif event["method"] == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """Returns the value of an expression; promises are awaited."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, script: str, seconds: float = 20.0) -> None:
        """Waits until an expression is true."""
        for _ in range(int(seconds / 0.05)):
            if await self.run(f"Boolean({script})"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(
            f"{script} has not become true; the page says: {await self.run('document.body.innerText')}"
        )

    async def type(self, selector: str, text: str) -> None:
        """Focuses an element and types into it."""
        await self.run(f"document.querySelector({selector!r}).focus()")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    async def look(self, width: int, height: int, dark: bool = False) -> None:
        """Sets the size of the window in CSS pixels, and the colour scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.asynccontextmanager
async def browsing(chromium: str) -> AsyncIterator[Tab]:
    """A tab of a new browser with an empty profile; both end with the block."""
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            chromium, *FLAGS, *root, f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as response:
                    [target] = [one for one in await response.json() if one["type"] == "page"]
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Tab(socket)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _port(path: Path, process: asyncio.subprocess.Process) -> int:
    for _ in range(600):
        if path.exists() and (lines := path.read_text().split("\n"))[0]:
            return int(lines[0])
        assert process.returncode is None, f"Chromium has ended with {process.returncode}"
        await asyncio.sleep(0.05)
    raise AssertionError("Chromium has not started within 30 s")
