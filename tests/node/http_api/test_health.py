"""A node's health: the problems of its workers, the responses of the probes and their port."""

from dataclasses import dataclass, field
from typing import cast

from aiohttp import ClientSession

from ftis_node.node.http_api.monitoring_api import MonitoringApi, serve_observed
from ftis_node.node.loops.status import StatusLoop, not_ready, worker_problems
from ftis_node.telemetry.status import HealthStatus, Status


def test_a_failed_worker_is_a_problem_and_a_starting_one_makes_the_node_not_ready():
    assert worker_problems({"generation": "backing-off", "learner": "off"}) == []
    assert "learner worker was given up" in worker_problems({"generation": "ready", "learner": "failed"})[0]
    up = {"generation": "ready", "learner": "off"}
    assert not_ready(up, swarm_state="standalone", swarm_reason="") == "", "the first node of a swarm is not ready"
    assert "looking" in not_ready(up, swarm_state="starting", swarm_reason="looking for peers")
    assert not_ready(up | {"generation": "starting"}, swarm_state="standalone", swarm_reason="") == (
        "the generation worker is starting"
    )


@dataclass
class FakeStatus:
    """A status loop with a fixed status."""

    latest: Status = field(
        default_factory=lambda: Status(health=HealthStatus(waits_for="the learner worker is starting"))
    )
    problems: list[str] = field(default_factory=list)


async def _get(port: int | None, path: str) -> tuple[int, str]:
    async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
        return response.status, await response.text()


async def test_probes_respond_from_the_start():
    observed, status = MonitoringApi(), FakeStatus()
    async with serve_observed(observed, ("127.0.0.1", 0), token=None) as port:
        assert await _get(port, "/healthz") == (200, "starting\n")
        code, text = await _get(port, "/readyz")
        assert (code, "loading" in text) == (503, True)
        assert 'ftis_node_state{state="starting"} 1.0' in (await _get(port, "/metrics"))[1]
        observed.status = cast("StatusLoop", status)
        assert await _get(port, "/healthz") == (200, "ok\n")
        assert await _get(port, "/readyz") == (503, "the learner worker is starting\n")
        status.latest = Status(health=HealthStatus(ready=True))
        assert await _get(port, "/readyz") == (200, "ready\n")
        status.problems = ["the pull loop ended", "another"]
        assert await _get(port, "/healthz") == (503, "the pull loop ended\nanother\n")
        assert (await _get(port, "/readyz"))[0] == 503
        for path in ("/status", "/peers", "/peers/ban", "/"):
            assert (await _get(port, path))[0] == 404, "other machines see more than metrics"
