"""The routes of a node's HTTP ports.

The local port has `/status`, `/peers`, `/swarm` and those for monitoring, and in an exchange node two more
(`exchange_api.py`). It listens on 127.0.0.1, and answers only requests that name this machine as their host. Any user
of this machine may read. Five routes change the node: `POST /peers/ban`, `/peers/unban`, `/peers/trust`, `/pause` and
`/resume`.

    {"peer": "12D3Koo...", "for_s": 7200}  ->  200 {"peer_id": ..., "trust_level": ..., ...} | {"error": "one line"}
    {"for_s": 7200}  ->  200 {"reason": ..., "until": ..., "in_effect": ...} | {"error": "one line"}

A web page that the operator visits can reach this port too. So each of these requests must carry the token of the home
(0600, new at every start) in a custom header. A page cannot read the token, and the browser sends no custom header to a
server that did not allow it.

The routes for monitoring are `/metrics` for Prometheus, `/healthz` and `/readyz` for probes of a container or service.

    /healthz  200, also while models load; 503 with a line for each problem that only a restart fixes
    /readyz   200 once the role's workers and the network are up; 503 with the missing components

If `observe.listen` is set, a second port for other machines serves only them. It opens before the models load, so that
no probe restarts a node during a long load. Its `/metrics` requires a token (`access.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from aiohttp import web

from ftis_node.errors import UsageError
from ftis_node.files import parse_json
from ftis_node.node.http_api.access import bearers_only, own_names_only, token_for_changes, write_token
from ftis_node.node.http_api.http_port import open_port
from ftis_node.node.loops.pause import ACTIONS as PAUSE_ACTIONS
from ftis_node.node.loops.pause import PauseLoop
from ftis_node.node.loops.status import StatusLoop
from ftis_node.node.pausing import length_of
from ftis_node.node.peers.peer_manager import PeerManager
from ftis_node.node.peers.swarm_reporter import SwarmReporter
from ftis_node.node.supervision.waits import in_background
from ftis_node.swarm.peer_rows import find_peer
from ftis_node.telemetry.metrics import CONTENT_TYPE, render_metrics
from ftis_node.telemetry.status import Status
from ftis_node.telemetry.status_at_rest import at_rest
from ftis_node.telemetry.terminal_text import one_line

HOST = "127.0.0.1"
MAX_REQUEST_BYTES = 4096
BODY_S = 10.0
STARTING = at_rest(Status(), "starting")
ACTIONS = ("ban", "unban", "trust")
MAX_BAN_S = 10 * 365 * 86400.0
Change: TypeAlias = "Callable[[dict[str, Any]], dict[str, Any]]"


@dataclass(slots=True)
class MonitoringApi:
    """Handlers for monitoring. `status` is None until the components run. `refused` counts requests by reason."""

    status: StatusLoop | None = None
    refused: Counter[str] = field(default_factory=Counter)

    def newest(self) -> Status:
        return self.status.latest if self.status else STARTING

    async def show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=render_metrics(self.newest()), headers={"Content-Type": CONTENT_TYPE})

    async def show_health(self, request: web.Request) -> web.Response:
        problems = self.status.problems if self.status else []
        return _answer("\n".join(problems), well="ok" if self.status else "starting")

    async def show_readiness(self, request: web.Request) -> web.Response:
        if self.status is None:
            return _answer("the models are loading, or the network is starting", well="")
        return _answer("\n".join(self.status.problems) or self.status.latest.health.waits_for, well="ready")


def add_probes(app: web.Application, observed: MonitoringApi) -> None:
    app.router.add_get("/metrics", observed.show_metrics)
    app.router.add_get("/healthz", observed.show_health)
    app.router.add_get("/readyz", observed.show_readiness)


@asynccontextmanager
async def serve_observed(
    observed: MonitoringApi, address: tuple[str, int] | None, *, token: str | None
) -> AsyncIterator[int | None]:
    """Serve the three routes at host and port while the block runs, and yield the port. Without `address` yield None.

    `/metrics` requires `token`. If it is None, the port answers only requests that name this machine as their host.

    Raise UsageError if the address cannot be opened.
    """
    if address is None:
        yield None
        return
    checked = own_names_only if token is None else bearers_only(token)
    app = web.Application(middlewares=[checked], client_max_size=MAX_REQUEST_BYTES)
    add_probes(app, observed)
    name, remedy = "observe.listen {}:{}".format(*address), "choose another address in node.toml"
    async with open_port(app, *address, name=name, remedy=remedy, refused=observed.refused) as port:
        yield port


def _answer(trouble: str, *, well: str) -> web.Response:
    return web.Response(text=f"{trouble or well}\n", status=503 if trouble else 200)


@dataclass(eq=False, repr=False)
class LocalApi:
    """Handlers over the status loop's latest snapshot, the reporter of the swarm and the operator's actions.

    `token_file` gets a new token when the port opens. Requests for changes must contain it. `add_exchange` adds the
    routes for a trainer. `pauses` is None for a node without workers.
    """

    status: StatusLoop
    swarm: SwarmReporter
    _: KW_ONLY
    token_file: Path
    add_exchange: Callable[[web.Application], None] | None = None
    pauses: PauseLoop | None = None

    async def show_status(self, request: web.Request) -> web.Response:
        return web.Response(body=self.status.latest.to_json(), content_type="application/json")

    async def show_peers(self, request: web.Request) -> web.Response:
        return web.json_response(self.swarm.rows())

    async def show_swarm(self, request: web.Request) -> web.Response:
        return web.json_response([(await in_background(self.swarm.view)).as_dict()])

    @asynccontextmanager
    async def serve(self, *, port: int) -> AsyncIterator[str]:
        """Serve while the block runs; yield the base URL. Raise UsageError if the port is taken."""
        checks = [own_names_only, token_for_changes(write_token(self.token_file))]
        app = web.Application(middlewares=checks, client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get("/status", self.show_status)
        app.router.add_get("/peers", self.show_peers)
        app.router.add_get("/swarm", self.show_swarm)
        add_probes(app, MonitoringApi(self.status))
        add_control(app, partial(change_peer, self.swarm.peers, self.swarm.rows))
        for action in PAUSE_ACTIONS:
            change = _refuse_pause if self.pauses is None else partial(self.pauses.change, action)
            app.router.add_post(f"/{action}", partial(_handle, change))
        if self.add_exchange is not None:
            self.add_exchange(app)
        async with serve_status(app, port=port, refused=self.status.http_refused) as url:
            yield url


@asynccontextmanager
async def serve_status(app: web.Application, *, port: int, refused: Counter[str]) -> AsyncIterator[str]:
    """Serve the status port while the block runs; yield the base URL. Raise UsageError if it is taken."""
    name = f"the status port {port}" if port else f"a port of {HOST}"
    remedy = "choose another with --status-port" if port else "end programs that hold ports, or allow them on loopback"
    async with open_port(app, HOST, port, name=name, remedy=remedy, refused=refused) as bound_port:
        yield f"http://{HOST}:{bound_port}"


def add_control(app: web.Application, change: Callable[..., dict[str, Any]]) -> None:
    """Add a route for each action on peers; `change` takes the action and the arguments."""
    for action in ACTIONS:
        app.router.add_post(f"/peers/{action}", partial(_handle, partial(change, action)))


def change_peer(
    peers: PeerManager, rows: Callable[[], list[dict[str, Any]]], action: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Do one of ACTIONS for the peer that `arguments["peer"]` names, and return its new row.

    `rows` are those of `peers --json`, to resolve names and shortened ids. `ban` takes `for_s` (seconds, by default the
    settings' longest time), `trust` takes `trusted`. Raise UsageError.
    """
    peer_id = find_peer(str(arguments.get("peer", "")), rows())
    match action:
        case "ban":
            peers.ban(peer_id, length_of(arguments, most_s=MAX_BAN_S))
        case "unban":
            peers.unban(peer_id)
        case "trust":
            peers.trust(peer_id, arguments.get("trusted", True) is True)
        case _:
            raise UsageError(f"{action!r} is none of {', '.join(ACTIONS)}")
    return {"peer_id": peer_id, **peers.row(peer_id)}


async def _handle(change: Change, request: web.Request) -> web.Response:
    try:
        async with asyncio.timeout(BODY_S):
            arguments = parse_json(await request.read(), source="the request")
        if not isinstance(arguments, dict):
            raise UsageError("a request is a JSON object")
        return web.json_response(change(arguments))
    except TimeoutError:
        return _refused(f"a request is complete within {BODY_S:.0f} s", 408)
    except (UsageError, ValueError) as error:
        return _refused(one_line(str(error)), 400)
    except OSError as error:
        return _refused(one_line(f"the node cannot write to its home: {error}"), 507)


def _refuse_pause(arguments: dict[str, Any]) -> dict[str, Any]:
    raise UsageError("this node has no workers to pause or resume: stop its trainer instead")


def _refused(line: str, status: int) -> web.Response:
    return web.json_response({"error": line}, status=status)
