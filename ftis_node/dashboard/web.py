"""Dashboard in a browser: textual-serve runs one dashboard for each open page and relays keys and frames.

Above it are the curves, as charts. The view of the whole swarm is a page alone.

The server checks the `Origin` header, so that pages of other sites in the same browser cannot use it. It checks the
`Host` header, because foreign names can resolve to 127.0.0.1. It requires a token that is new at every start, because
other users of the machine can reach the port but not the home. The printed address contains the token; the first
response moves it into a cookie.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from textual_serve.server import Server

from ftis_node.config.home import Home
from ftis_node.config.observe import is_loopback
from ftis_node.errors import FtisError
from ftis_node.node.http_api.access import host_name, is_same_secret
from ftis_node.node.http_api.http_port import open_port
from ftis_node.telemetry.terminal_text import one_line

MAX_PAGES = 8  # each page runs a process
TOKEN_BYTES = 24
COOKIE = "ftis-dashboard-{port}"  # a browser sends a cookie to every port of a machine
PAGES = Path(__file__).parent / "pages"
WEBSOCKET_PATH, CURVES_PATH = "/ws", "/curves"
CONTENT_POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'none'"
)


def warning_of(host: str, port: int) -> str | None:
    """Return the consequences of listening on `host`; None for the loopback interface."""
    if is_loopback(host):
        return None
    return (
        f"listening on {host}: anyone with the address below can read the dashboard (prompts, completions, peers, "
        "addresses); the connection is not encrypted. Nobody can change the node with it. To use ssh instead: "
        f"omit --host and run `ssh -L {port}:127.0.0.1:{port} THIS-MACHINE`"
    )


def refusal_of(*, bound_to: str, host: str, origin: str | None) -> str | None:
    """Return why a request is refused, by its `Host` and `Origin`; None for a valid one."""
    if is_loopback(bound_to) and not is_loopback(host_name(host)):
        return f"this dashboard serves this machine only: open http://{bound_to}, not {one_line(host)}"
    if origin is not None and origin.partition("://")[2] != host:
        return "pages of other sites must not read this dashboard"
    return None


class DashboardServer(Server):  # type: ignore[misc]  # textual-serve has no types
    """textual-serve with our own page, which loads nothing from other sites, and with the checks above.

    `draw` returns HTML, and blocks: the page of the swarm if `is_swarm`, else the node's curves.
    """

    def __init__(
        self, home: Home, *, host: str, port: int, token: str, draw: Callable[[], str], is_swarm: bool
    ) -> None:
        words = [sys.executable, "-m", "ftis_node", "dashboard", "--no-curves", "--home", str(home.root)]
        super().__init__(shlex.join(words), host=host, port=port, title="ftis-node", templates_path=PAGES)
        self._token = token
        self._cookie = COOKIE.format(port=port)
        self._num_pages = 0
        self._draw, self._is_swarm = draw, is_swarm
        self._drawing = asyncio.Lock()

    def initialize_logging(self) -> None:
        """Do nothing: the command has set up logging."""

    async def on_startup(self, app: web.Application) -> None:
        """Do nothing: the command has printed the address."""

    async def handle_index(self, request: web.Request) -> web.Response:
        """Return the page. It derives its own address, so that it works through a tunnel.

        Without `?fontsize=N`, the page selects the font size at which 80 columns fit its width.
        """
        import aiohttp_jinja2

        if self._is_swarm:
            return await self.handle_drawn(request)
        size = request.query.get("fontsize", "")
        context = {"font_size": int(size) if size.isdecimal() and len(size) < 3 else ""}
        return aiohttp_jinja2.render_template("app_index.html", request, context)

    async def handle_drawn(self, request: web.Request) -> web.Response:
        """Return what `draw` returns, drawn in a thread; its error as 503."""
        try:
            async with self._drawing:
                html = await asyncio.to_thread(self._draw)
        except (FtisError, OSError) as error:
            return web.Response(status=503, text=one_line(str(error)))
        return web.Response(text=html, content_type="text/html")

    async def serve_until_signal(self, on_ready: Callable[[], None]) -> None:
        """Serve until SIGINT or SIGTERM; call `on_ready` when the port is open. Raises UsageError if it is taken."""
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        app, name = await self._make_app(), f"port {self.port} of {self.host}"
        remedy = "select others with --host and --port"
        async with open_port(app, self.host, self.port, name=name, remedy=remedy, refused=Counter()):
            on_ready()
            await ended.wait()

    async def _make_app(self) -> web.Application:
        app: web.Application = await super()._make_app()
        app.router.add_get(CURVES_PATH, self.handle_drawn)
        app.middlewares.append(self._checked)
        return app

    @web.middleware
    async def _checked(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        why = refusal_of(bound_to=self.host, host=request.host, origin=request.headers.get("Origin"))
        if why is not None:
            return web.Response(status=403, text=why)
        if not is_same_secret(request.cookies.get(self._cookie, ""), self._token):
            return self._admitted(request)
        if request.path != WEBSOCKET_PATH:
            response = await handler(request)
            response.headers["Content-Security-Policy"] = CONTENT_POLICY
            return response
        if self._num_pages >= MAX_PAGES:
            return web.Response(status=503, text=f"{MAX_PAGES} pages are open, the maximum: close one")
        self._num_pages += 1
        try:
            return await handler(request)
        finally:
            self._num_pages -= 1

    def _admitted(self, request: web.Request) -> web.Response:
        """Set the cookie and redirect to the page if the address has the token; else reply 401."""
        if not is_same_secret(request.query.get("token", ""), self._token):
            return web.Response(
                status=401, text="the token is missing: open the address that `ftis-node dashboard --web` printed"
            )
        answer = web.Response(status=303, headers={"Location": "/", "Referrer-Policy": "no-referrer"})
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="Strict")
        return answer


def serve_dashboard(
    home: Home, draw: Callable[[], str], *, host: str, port: int, is_swarm: bool, show: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM, as `DashboardServer` describes. `show` gets lines for the operator.

    Raises UsageError if the port is taken.
    """
    if warning := warning_of(host, port):
        show(f"ftis-node: {warning}")
    token = secrets.token_urlsafe(TOKEN_BYTES)
    address = f"http://{host}:{port}/?token={token}"
    server = DashboardServer(home, host=host, port=port, token=token, draw=draw, is_swarm=is_swarm)
    line = f"the dashboard is at {address} (ctrl-C ends it; the node keeps running)"
    asyncio.run(server.serve_until_signal(lambda: show(line)))
