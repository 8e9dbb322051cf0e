"""Headless Chromium, driven over its debugging port: open a page, ask it things, take a picture."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import ClientSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from aiohttp import ClientWebSocketResponse

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-unsafe-swiftshader", "--remote-debugging-port=0")
START_S = 30.0


class Page:
    """One page of the browser."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json(timeout=START_S)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    async def value(self, expression: str) -> Any:
        """What a line of JavaScript gives."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    async def picture(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])


@asynccontextmanager
async def browse(url: str, folder: Path, *, width: int, height: int) -> AsyncIterator[Page]:
    """A page that is being loaded; the browser is ended with the block."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}", url]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:  # noqa: ASYNC220
        try:
            port = await asyncio.to_thread(_port, folder / "DevToolsActivePort")
            async with ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    targets = await answer.json()
                page = next(target for target in targets if target["type"] == "page")
                async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    opened = Page(socket)
                    await opened.call("Emulation.setFocusEmulationEnabled", enabled=True)
                    yield opened
        finally:
            browser.terminate()


def _port(told_in: Path) -> int:
    deadline = time.monotonic() + START_S
    while not (told_in.exists() and told_in.read_text().strip()):
        assert time.monotonic() < deadline, "the browser does not start"
        time.sleep(0.05)
    return int(told_in.read_text().split("\n", 1)[0])
