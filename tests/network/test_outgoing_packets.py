"""A real node sends packets only to its given peers: a recorder writes all destinations and DNS queries.

node --- wan --- router --- wan --- bootstrap node
  `- recorder: packets of all processes of the node
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ftis_node.config.no_network_env import NO_TELEMETRY, WORKERS_STAY_OFFLINE
from tests.models.tiny_models import save_tiny
from tests.network.hosts import Host
from tests.node.support import RunningNode, started, write_manifest

RECORDER = Path(__file__).with_name("recorder.py")
START_S = 500.0
LOCAL_ONLY = (  # requests to a home router to map a port stay in the local network
    "udp 239.255.255.250:1900",
    "udp 11.0.1.1:5351",
)


@contextmanager
def recorded(host: Host, path: Path) -> Iterator[Callable[[], set[str]]]:
    """Record what leaves a host, and yield a function that returns the recorder's lines."""
    command = host.inside(sys.executable, "-I", "-S", str(RECORDER), str(path), str(os.getpid()))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recorder:
        try:
            assert recorder.stdout is not None
            assert recorder.stdout.readline() == "ready\n"
            yield lambda: set(path.read_text().splitlines())
        finally:
            recorder.kill()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_node_sends_only_to_the_peers_that_it_was_given(internet, tmp_path, request, monkeypatch, engine):
    for name in NO_TELEMETRY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    node_host, bootstrap_host = internet.host("node"), internet.host("bootstrap")
    if engine == "vllm":  # vLLM supports no smaller heads
        model = request.getfixturevalue("tiny_models")["s"]
    else:
        model = save_tiny(tmp_path / "tiny")
    run = write_manifest(tmp_path / "run.toml", foreign_wait_s=0.5)
    bootstrap_arguments = ("bootstrap", "--listen", bootstrap_host.listen)
    with (
        started(tmp_path / "bootstrap", *bootstrap_arguments, on=bootstrap_host.inside()) as bootstrap,
        recorded(node_host, tmp_path / "recorded") as lines,
    ):
        join = ("join", "--model", str(model), "--run", str(run), "--engine", engine)
        peers = ("--peers", bootstrap.first_line(), "--listen", node_host.listen)
        with started(tmp_path / "node", *join, *peers, on=node_host.inside()) as node:
            node.wait_for(lambda: len(node.events("step")) >= 1, timeout_s=START_S)
            assert_telemetry_off(node)
            node.stop()
        outside = lines() - set(LOCAL_ONLY)
    assert outside, "the node never connected"
    assert {line for line in outside if not line.startswith(f"tcp {bootstrap_host.address}:")} == set()


def assert_telemetry_off(node: RunningNode) -> None:
    """Assert that telemetry of libraries is off in the environment of each process of the node."""
    for process in node.processes():
        environment = process.environ()
        wrong = {name for name, value in NO_TELEMETRY.items() if environment.get(name) != value}
        if process.pid != node.process.pid:  # a node sets them for the processes that it starts
            assert not wrong, (process.cmdline(), wrong)
        if any("worker" in word for word in process.cmdline()[1:3]):
            assert WORKERS_STAY_OFFLINE.items() <= environment.items()
