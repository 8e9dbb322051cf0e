"""Access to the HTTP ports by host name and token, and what the probes of a node's health answer."""

import stat
from dataclasses import dataclass, field
from typing import cast

import pytest
from aiohttp import ClientSession

from ftis_node.config.home import Home
from ftis_node.config.observe import ObserveSection, is_loopback
from ftis_node.errors import ConfigError
from ftis_node.node.http_api.access import observe_token, read_token
from ftis_node.node.http_api.routes import MonitoringApi, serve_observed
from ftis_node.node.loops.status import StatusLoop, not_ready, worker_problems
from ftis_node.telemetry.status import HealthStatus, Status

TOKEN = "0f" * 32


async def _status(url: str, **headers: str) -> int:
    async with ClientSession() as session, session.get(url, headers=headers) as response:
        return response.status


async def test_on_a_public_address_metrics_need_the_token_and_probes_do_not():
    async with serve_observed(MonitoringApi(), ("0.0.0.0", 0), token=TOKEN) as port:
        base_url = f"http://127.0.0.1:{port}"
        assert await _status(f"{base_url}/metrics") == 401
        assert await _status(f"{base_url}/metrics", Authorization=f"Bearer {TOKEN[:-1]}0") == 401
        assert await _status(f"{base_url}/metrics", Authorization=TOKEN) == 401
        assert await _status(f"{base_url}/metrics", Authorization=f"Bearer {TOKEN}", Host="gpu-box:9464") == 200
        assert await _status(f"{base_url}/healthz", Host="10.0.0.7:9464") == 200
        assert await _status(f"{base_url}/readyz") == 503  # permitted, and not ready yet
        assert await _status(f"{base_url}/elsewhere") == 401


async def test_a_foreign_host_name_is_refused():
    async with serve_observed(MonitoringApi(), ("127.0.0.1", 0), token=None) as port:
        base_url = f"http://127.0.0.1:{port}/metrics"
        assert await _status(base_url) == 200
        assert await _status(base_url, Host="localhost:9000") == 200  # through a tunnel
        assert await _status(base_url, Host=f"[::1]:{port}") == 200
        assert await _status(base_url, Host=f"evil.example:{port}") == 403
        assert await _status(base_url, Host="127.0.0.1.evil.example") == 403
        assert await _status(base_url, Origin="https://evil.example") == 403
        assert await _status(base_url, **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "empty"}) == 403
        assert await _status(base_url, **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}) == 200


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("localhost.evil.example", False), ("", False)],
)  # fmt: skip
def test_loopback_addresses_are_recognized(host, is_local):
    assert is_loopback(host) == is_local


def test_the_token_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    home = Home(tmp_path)
    assert observe_token(ObserveSection(), home) is None
    assert observe_token(ObserveSection(listen="127.0.0.1:0"), home) is None
    made = observe_token(ObserveSection(listen="0.0.0.0:9464"), home)
    assert made is not None and len(made) == 64
    assert stat.S_IMODE(home.observe_token.stat().st_mode) == 0o600
    assert observe_token(ObserveSection(listen="[::]:9464"), home) == made


def test_a_file_without_a_token_or_open_to_others_is_a_one_line_error(tmp_path):
    path = tmp_path / "token"
    section = ObserveSection(listen="127.0.0.1:0", token_file=str(path))
    with pytest.raises(ConfigError, match="No such file or directory; make one: openssl rand -hex 32"):
        observe_token(section, Home(tmp_path))
    for contents in ("short", "two words " * 8, "\xff" * 40):
        path.write_text(contents, encoding="latin-1")
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="holds no token"):
            read_token(path)
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o640)
    assert observe_token(section, Home(tmp_path)) == TOKEN
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"open to other users \(mode 644\): chmod 600"):
        read_token(path)


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
