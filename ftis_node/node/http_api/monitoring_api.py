"""Routes for monitoring: `/metrics` for Prometheus, `/healthz` and `/readyz` for probes of a container or service.

    /healthz  200, also while models load; 503 with a line for each problem that only a restart fixes
    /readyz   200 once the role's workers and the network are up; 503 with the missing components

The local port serves them. If `observe.listen` is set, a second port for other machines serves only them. The second
port opens before the models load, so that no probe restarts a node during a long load. Its `/metrics` requires a token
(`http_port.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from ftis_node.node.http_api.http_port import bearers_only, open_port, own_names_only
from ftis_node.node.loops.status import StatusLoop
from ftis_node.telemetry.metrics import CONTENT_TYPE, render_metrics
from ftis_node.telemetry.status import Status
from ftis_node.telemetry.status_at_rest import at_rest

MAX_REQUEST_BYTES = 1024  # no route takes a body
STARTING = at_rest(Status(), "starting")


@dataclass(slots=True)
class MonitoringApi:
    """Handlers of the routes. `status` is None until the node's components run. `refused` counts requests by reason."""

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
