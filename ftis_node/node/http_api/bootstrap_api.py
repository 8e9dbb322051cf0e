"""The local HTTP port of a bootstrap node: the directory's records as a page, as JSON and as metrics.

    /         a page that reloads itself
    /swarm    the same as JSON, for `ftis-node swarm` and the dashboard
    /metrics  for Prometheus
    /healthz  200 while the directory answers; else 503

It listens on 127.0.0.1 and changes nothing.
"""

from __future__ import annotations

import asyncio
import html
import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ftis_node.node.http_api.auth import own_names_only
from ftis_node.node.http_api.connection_limits import HttpGuard
from ftis_node.node.peers.swarm_status import view_of
from ftis_node.swarm.overview.view import render_views
from ftis_node.swarm.peer_guard import UNPROVEN, Place
from ftis_node.telemetry.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from ftis_node.gossip.bootstrap import BootstrapNode
    from ftis_node.swarm.overview.view import SwarmView

log = logging.getLogger(__name__)
HOST = "127.0.0.1"
MAX_REQUEST_BYTES = 1024  # no route takes a body
SURVEY_PERIOD_S = 10.0
STALE_S = 300.0
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="refresh" content="10"><title>ftis-node bootstrap</title>
<style>:root {{ color-scheme: light dark }} body {{ margin: 1em }} pre {{ overflow-x: auto }}</style></head>
<body><h1>ftis-node bootstrap</h1><pre>{text}</pre></body></html>
"""
CONNECTED = "ftis_bootstrap_peers_connected"
RUNS = "ftis_bootstrap_runs"
MEMBERS = "ftis_bootstrap_members"
REFUSED = "ftis_bootstrap_records_refused_total"
HELP = {
    CONNECTED: "Peers of any run that are connected.",
    RUNS: "Runs with members in the directory, at most 8.",
    MEMBERS: "Members of a run in the directory.",
    REFUSED: "Directory records that were refused since the start.",
}


async def show_nothing(request: web.Request) -> web.Response:
    """Return 404 as JSON, from which `ftis-node status` recognizes a bootstrap node."""
    return web.json_response({"error": "a bootstrap node has no such figures"}, status=404)


class BootstrapApi:
    """Handlers over the last survey of the directory. `run` surveys it every `SURVEY_PERIOD_S`."""

    def __init__(self, node: BootstrapNode) -> None:
        self._node = node
        self._views: list[SwarmView] = []
        self._num_connected = 0
        self._surveyed_at = time.monotonic()

    async def run(self) -> None:
        """Survey the directory until canceled. Keep the last survey if one fails."""
        while True:
            with self._node.guard.work_for(UNPROVEN, Place.DIRECTORY, passes=(OSError, EOFError)):
                await self._survey()
            await asyncio.sleep(SURVEY_PERIOD_S)

    async def _survey(self) -> None:
        try:
            self._num_connected = len(await self._node.connected_peers())
            self._views = [view_of(survey) for survey in await self._node.survey()]
            self._surveyed_at = time.monotonic()
        except (OSError, EOFError) as error:  # includes TimeoutError, for example while p2pd restarts
            log.debug("survey of the directory failed: %r", error)

    async def show_page(self, request: web.Request) -> web.Response:
        """Return the page, with the text of peers escaped for terminals and for HTML."""
        lines = [f"{self._num_connected} peers are connected", "", *render_views(self._views)]
        if self._node.num_runs_omitted:
            more = f"{self._node.num_runs_omitted} runs with fewer members are not shown"
            lines += ["", f"{more}; `ftis-node bootstrap --run RUN_ID` shows a run first"]
        return web.Response(text=PAGE.format(text=html.escape("\n".join(lines))), content_type="text/html")

    async def show_swarm(self, request: web.Request) -> web.Response:
        """Return a list with the view of each run."""
        return web.json_response([view.as_dict() for view in self._views])

    async def show_metrics(self, request: web.Request) -> web.Response:
        """Return the counts for Prometheus."""
        members = {view.run.id: len(view.peers) + view.num_omitted + view.num_unreadable for view in self._views}
        body = render_bootstrap_metrics(
            num_connected=self._num_connected, members=members, counters=self._node.counters
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
        async with HttpGuard().serving(app, HOST, port) as url:
            surveying = asyncio.create_task(self.run(), name="bootstrap-survey")
            try:
                yield url
            finally:
                surveying.cancel()
                await asyncio.gather(surveying, return_exceptions=True)


class RecordCounters(Protocol):
    """Counters of the network that the metrics read."""

    records_refused: int


def render_bootstrap_metrics(*, num_connected: int, members: Mapping[str, int], counters: RecordCounters) -> bytes:
    """Return the text that a Prometheus server scrapes. `members` counts by run id."""

    class FromSurvey:
        def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
            yield GaugeMetricFamily(CONNECTED, HELP[CONNECTED], value=num_connected)
            yield GaugeMetricFamily(RUNS, HELP[RUNS], value=len(members))
            family = GaugeMetricFamily(MEMBERS, HELP[MEMBERS], labels=["run_id"])
            for run_id, count in members.items():
                family.add_metric([run_id], count)
            yield family
            yield CounterMetricFamily(REFUSED, HELP[REFUSED], value=counters.records_refused)

    registry = CollectorRegistry()
    registry.register(FromSurvey())
    return generate_latest(registry)
