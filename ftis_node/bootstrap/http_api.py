"""The local HTTP port of a bootstrap node, which shows the directory's records as a page, as JSON and as metrics:

    /         a page that reloads itself
    /swarm    the same as JSON, for `ftis-node swarm` and the dashboard
    /metrics  for Prometheus
    /healthz  200 while the directory answers; else 503

It listens on 127.0.0.1 and changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ftis_node.bootstrap.survey import view_of
from ftis_node.gossip.bootstrap_node import BootstrapNode
from ftis_node.node.http_api.access import own_names_only
from ftis_node.node.http_api.routes import serve_status
from ftis_node.report.swarm_page import swarm_page
from ftis_node.swarm.overview import SwarmView
from ftis_node.swarm.peer_guard import UNPROVEN, Place
from ftis_node.telemetry.metrics import CONTENT_TYPE, render_families

MAX_REQUEST_BYTES = 1024  # no route takes a body
SURVEY_PERIOD_S = 10.0
STALE_S = 300.0
HELP = {
    "ftis_bootstrap_peers_connected": "Peers of any run that are connected.",
    "ftis_bootstrap_runs": "Runs with members in the directory, at most 8.",
    "ftis_bootstrap_members": "Members of a run in the directory.",
    "ftis_bootstrap_records_refused_total": "Directory records that were refused since the start.",
}


async def show_nothing(request: web.Request) -> web.Response:
    """Return 404 as JSON, from which `ftis-node status` recognizes a bootstrap node."""
    return web.json_response({"error": "a bootstrap node has no such figures"}, status=404)


class BootstrapApi:
    """Handlers over the last survey of the directory. `run` surveys it every `SURVEY_PERIOD_S`."""

    def __init__(self, node: BootstrapNode) -> None:
        self._node = node
        self._page: str | None = None  # of the last survey, made for the first visitor
        self._rendering = asyncio.Lock()
        self._views: list[SwarmView] = []
        self._num_connected = 0
        self._surveyed_at = time.monotonic()

    async def run(self) -> None:
        """Survey the directory until canceled. Keep the last survey if one fails."""
        while True:
            with self._node.guard.work_for(UNPROVEN, Place.DIRECTORY), suppress(OSError, EOFError):  # p2pd restarts
                self._num_connected = len(await self._node.connected_peers())
                self._views = [view_of(survey) for survey in await self._node.survey()]
                self._surveyed_at = time.monotonic()
                self._page = None
            await asyncio.sleep(SURVEY_PERIOD_S)

    async def show_page(self, request: web.Request) -> web.Response:
        """Return the page, drawn at most once after each survey, in a thread."""
        note, pinned = f"{self._num_connected} peers are connected.", self._node.pinned_runs
        views = [view for view in self._views if not pinned or view.run.id in pinned]  # anyone may store a run
        if self._node.num_runs_omitted and not pinned:
            more = f"{self._node.num_runs_omitted} runs with fewer members are not shown"
            note += f" {more}; ftis-node bootstrap --run RUN_ID shows one run."
        async with self._rendering:
            page = self._page or await asyncio.to_thread(swarm_page, views, addresses=self._node.addresses, note=note)
            self._page = page
        return web.Response(text=page, content_type="text/html")

    async def show_swarm(self, request: web.Request) -> web.Response:
        return web.json_response([view.as_dict() for view in self._views])

    async def show_metrics(self, request: web.Request) -> web.Response:
        connected, runs, of_run, refused = HELP.items()
        members = GaugeMetricFamily(*of_run, labels=["run_id"])
        for view in self._views:
            members.add_metric([view.run.id], len(view.peers) + view.num_omitted + view.num_unreadable)
        body = render_families(
            [
                GaugeMetricFamily(*connected, value=self._num_connected),
                GaugeMetricFamily(*runs, value=len(self._views)),
                members,
                CounterMetricFamily(*refused, value=self._node.counters.records_refused),
            ]
        )
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def show_health(self, request: web.Request) -> web.Response:
        """Return 200, or 503 if no survey succeeded for `STALE_S`."""
        still_s = time.monotonic() - self._surveyed_at
        if still_s < STALE_S:
            return web.Response(text="ok\n")
        return web.Response(text=f"the directory has not answered for {still_s:.0f} s\n", status=503)

    @asynccontextmanager
    async def serve(self, *, port: int) -> AsyncIterator[str]:
        """Serve and survey while the block runs; yield the base URL. Raise UsageError if the port is taken."""
        app = web.Application(middlewares=[own_names_only], client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get("/", self.show_page)
        app.router.add_get("/swarm", self.show_swarm)
        app.router.add_get("/status", show_nothing)
        app.router.add_get("/peers", show_nothing)
        app.router.add_get("/metrics", self.show_metrics)
        app.router.add_get("/healthz", self.show_health)
        async with serve_status(app, port=port, refused=Counter()) as url:
            surveying = asyncio.create_task(self.run(), name="bootstrap-survey")
            try:
                yield url
            finally:
                surveying.cancel()
                await asyncio.gather(surveying, return_exceptions=True)
