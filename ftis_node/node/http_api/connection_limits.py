"""Limits of an HTTP port: connections in total and per address, seconds to a complete request, sizes.

The port closes a connection that sends no complete header within REQUEST_S, or no further request within KEEP_ALIVE_S.
A client may half-close after its last request: it gets the answer, and then the port closes the connection.

At a limit, a new connection replaces the oldest one that waits for a request. If all connections have a request in
progress, the port closes the new one. So idle connections do not delay clients that send requests.

The guard counts refused connections by reason, and they leave no traceback in the log.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ftis_node.errors import UsageError
from ftis_node.telemetry.log import RateLimitedLog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp.typedefs import Handler

log = logging.getLogger(__name__)

SHUTDOWN_S = 0.5
BACKLOG = 128
MAX_LINE_BYTES = 8190
MAX_HEADERS = 64
HALF_CLOSED_S = 1.0  # from a client's last byte to the start of the answer
IPV6_SITE_BITS = 64  # prefix length: one subscriber has all addresses of a /64 network
REASONS = {400: "malformed", 401: "token", 403: "forbidden", 404: "unknown", 405: "unknown", 408: "slow", 413: "size"}
SLOW, CROWDED, MALFORMED, OTHER = "slow", "crowded", "malformed", "other"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one port, with times in seconds."""

    connections: int = 128
    connections_per_address: int = 64
    request_s: float = 10.0
    keep_alive_s: float = 15.0


class HttpGuard:
    """Serves one application within the limits. `refused` counts by reason, and several ports may share it."""

    def __init__(self, refused: Counter[str] | None = None, *, limits: HttpLimits | None = None) -> None:
        self.refused: Counter[str] = Counter() if refused is None else refused
        self.limits = limits or HttpLimits()
        self._open: dict[asyncio.BaseTransport, _Connection] = {}
        self._faults = RateLimitedLog()

    @asynccontextmanager
    async def serving(self, app: web.Application, host: str, port: int) -> AsyncIterator[str]:
        """Serve the status port while the block runs; yield the base URL. Raise UsageError if the port is taken."""
        remedy = "choose another with --status-port"
        async with self.open_port(app, host, port, name=f"the status port {port}", remedy=remedy) as bound_port:
            yield f"http://{host}:{bound_port}"

    @asynccontextmanager
    async def open_port(
        self, app: web.Application, host: str, port: int, *, name: str, remedy: str
    ) -> AsyncIterator[int]:
        """Serve while the block runs; yield the port. Raise UsageError, with `name` and `remedy`, if it is taken."""
        app.middlewares.insert(0, self._watched)
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=SHUTDOWN_S,
            logger=_QuietLog(self),
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            lingering_time=self.limits.request_s,
        )
        await runner.setup()
        handle = runner.server
        assert handle is not None, "the runner is set up"
        try:
            try:
                loop = asyncio.get_running_loop()
                server = await loop.create_server(lambda: _Connection(self, handle), host, port, backlog=BACKLOG)
            except OSError as error:
                raise UsageError(f"{name} cannot be opened ({error.strerror}): {remedy}") from None
            try:
                yield int(server.sockets[0].getsockname()[1])
            finally:
                server.close()
        finally:
            await runner.cleanup()

    def admit(self, connection: _Connection) -> bool:
        """Return whether to accept a new connection; close an idle older one for it if necessary."""
        same = [other for other in self._open.values() if other.address == connection.address]
        if len(same) >= self.limits.connections_per_address and not self._make_way(same):
            return False
        if len(self._open) >= self.limits.connections and not self._make_way(list(self._open.values())):
            return False
        self._open[connection.transport] = connection
        return True

    def forget(self, connection: _Connection) -> None:
        self._open.pop(connection.transport, None)

    def note_fault(self, error: BaseException) -> None:
        """Log a failed response at most once a minute: it is a fault of this node, and ends only the connection."""
        self.refused["fault"] += 1
        if self._faults.is_due():
            log.error("an HTTP request could not be answered (%d so far)", self._faults.count, exc_info=error)

    def _make_way(self, among: list[_Connection]) -> bool:
        """Close the oldest connection that waits for a request, first among those that never sent any."""
        waiting = [connection for connection in among if not connection.is_answered]
        if not waiting:
            return False
        oldest = next((connection for connection in waiting if not connection.num_requests), waiting[0])
        oldest.end(CROWDED)
        return True

    @web.middleware
    async def _watched(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = self._open.get(cast("asyncio.BaseTransport", request.transport))
        if connection is not None:
            connection.begin_answer()
        try:
            response = await self._answer(request, handler)
        finally:
            if connection is not None:
                connection.end_answer()
        if connection is not None and connection.is_half_closed:
            response.force_close()
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            self._count(error.status)
            raise
        except ConnectionError:  # the client is gone
            return web.Response(status=400)
        except Exception as error:
            self.note_fault(error)
            return web.Response(status=500, text="the request could not be answered\n")
        self._count(response.status)
        return response

    def _count(self, status: int) -> None:
        if 400 <= status < 500:
            self.refused[REASONS.get(status, OTHER)] += 1


class _Connection(asyncio.Protocol):
    """Protocol wrapper around aiohttp's own: admits the connection, and closes it when it is idle too long."""

    def __init__(self, guard: HttpGuard, make_inner: web.Server) -> None:
        self._guard = guard
        self._make_inner = make_inner
        self._inner = asyncio.Protocol()  # a null object until the connection is admitted
        self._deadline: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport
        self.address = ""
        self.is_answered = False
        self.is_half_closed = False
        self.num_requests = 0
        self._has_data = False  # since the last answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.address = _site(transport.get_extra_info("peername"))
        if not self._guard.admit(self):
            self._guard.refused[CROWDED] += 1
            self.transport.abort()
            return
        self._inner = self._make_inner()
        self._inner.connection_made(transport)
        self._wait_for_request(self._guard.limits.request_s)

    def data_received(self, data: bytes) -> None:
        self._has_data = True
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Return whether a request waits for its answer, and so keeps the connection open for writing."""
        if not (self._has_data or self.is_answered):
            return None
        self._inner.eof_received()
        self.is_half_closed = True
        if not self.is_answered:
            self._wait_for_request(HALF_CLOSED_S)
        return True

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._guard.forget(self)
        self._inner.connection_lost(exc)

    def begin_answer(self) -> None:
        """Stop the time limit of the request, whose header is complete."""
        self.is_answered = True
        self.num_requests += 1
        self._stop_clock()

    def end_answer(self) -> None:
        """Start the keep-alive limit, for the rest of the response and the next request."""
        self.is_answered = self._has_data = False
        if not self.transport.is_closing():
            self._wait_for_request(self._guard.limits.keep_alive_s)

    def end(self, reason: str) -> None:
        """Close the connection at once, and count the reason."""
        self._guard.refused[reason] += 1
        self._guard.forget(self)
        self.transport.abort()

    def _wait_for_request(self, limit_s: float) -> None:
        self._stop_clock()
        self._deadline = asyncio.get_running_loop().call_later(limit_s, self._run_out)

    def _run_out(self) -> None:
        """Close an idle connection. Do not count it as refused if it has served a request."""
        if self.num_requests:
            self._guard.forget(self)
            self.transport.abort()
        else:
            self.end(SLOW)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _QuietLog(logging.LoggerAdapter[logging.Logger]):
    """Log adapter for aiohttp: counts malformed requests, and logs other errors at most once a minute."""

    def __init__(self, guard: HttpGuard) -> None:
        super().__init__(log, {})
        self._guard = guard

    def debug(self, msg: object, *args: object, exc_info: Any = None, **kwargs: Any) -> None:
        """Count a first request with an invalid method, which aiohttp reports as another protocol."""
        self._guard.refused[MALFORMED] += isinstance(exc_info, HttpProcessingError)

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        if isinstance(exc_info, HttpProcessingError | ConnectionError):
            self._guard.refused[MALFORMED] += 1
        elif isinstance(exc_info, BaseException):
            self._guard.note_fault(exc_info)


def _site(peername: Any) -> str:
    """Return the address by which a limit counts; for IPv6, the subscriber's network."""
    host = str(peername[0]) if peername else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, IPV6_SITE_BITS), strict=False))
    return str(address)
