"""Headless Chromium, driven over its debugging port: open a page, evaluate JavaScript, take a screenshot."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

from tests.waiting import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-unsafe-swiftshader", "--remote-debugging-port=0")
START_S = 30.0


class Page:
    """One page of the browser."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the protocol and return its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            reply = await self._socket.receive_json(timeout=START_S)
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result

    async def value(self, expression: str) -> Any:
        """Evaluate JavaScript and return its value."""
        reply = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return reply["result"].get("value")

    async def screenshot(self) -> bytes:
        """Return the page as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])


@asynccontextmanager
async def browse(url: str, folder: Path, *, width: int, height: int) -> AsyncIterator[Page]:
    """Open a page in a browser that ends with the block; the page may still load."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}", url]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:  # noqa: ASYNC220
        try:
            port = await asyncio.to_thread(_port, folder / "DevToolsActivePort")
            async with ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as reply:
                    targets = await reply.json()
                target = next(target for target in targets if target["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
                    yield page
        finally:
            browser.terminate()


def _port(file: Path) -> int:
    wait_until(lambda: file.exists() and file.read_text().strip(), within_s=START_S)
    return int(file.read_text().splitlines()[0])
