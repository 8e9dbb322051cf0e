"""A real node speaks to the peers that it was given, and to nobody else: every packet and question is written down.

node --- wan --- router --- wan --- meeting point
  `- recorder: all that leaves, from whichever of the node's processes
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ftis_node.config.no_network_env import NO_TELEMETRY, WORKERS_STAY_OFFLINE
from tests.models.tiny_models import save_tiny
from tests.node.support import RunningNode, started, write_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.network.hosts import Host, Internet

RECORDER = Path(__file__).with_name("recorder.py")
START_S = 500.0
NEAR_ONLY = (  # a home router is asked to map a port: that never leaves the local network
    "udp 239.255.255.250:1900",
    "udp 11.0.1.1:5351",
)


@contextmanager
def recorded(host: Host, path: Path) -> Iterator[Callable[[], set[str]]]:
    """What leaves a host while the block runs, as the recorder's lines."""
    command = host.inside(sys.executable, "-I", "-S", str(RECORDER), str(path), str(os.getpid()))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recorder:
        try:
            assert recorder.stdout is not None
            assert recorder.stdout.readline() == "ready\n"
            yield lambda: set(path.read_text().splitlines())
        finally:
            recorder.kill()


def test_the_recorder_sees_an_address_and_a_question(internet: Internet, tmp_path: Path) -> None:
    host = internet.host("speaker")
    with recorded(host, tmp_path / "said") as said:
        speak = (
            "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('192.0.2.7', 99))\n"
        )
        ask = "q = bytes(12) + b'\\x05stats\\x07example\\x00\\x00\\x01\\x00\\x01'; s.sendto(q, ('127.0.0.53', 53))\n"
        call = "t = socket.socket(); t.setblocking(False); t.connect_ex(('198.51.100.9', 443))\n"
        host.run(sys.executable, "-I", "-S", "-c", speak + ask + call)
        expected = {"udp 192.0.2.7:99", "dns stats.example", "tcp 198.51.100.9:443"}
        deadline = time.monotonic() + 20
        while not expected <= said() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert said() == expected


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_node_speaks_to_the_peers_it_was_given_and_to_nobody_else(
    internet: Internet, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    for name in NO_TELEMETRY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    here, there = internet.host("node"), internet.host("meeting")
    if engine == "vllm":  # which takes no smaller heads
        model = request.getfixturevalue("tiny_models")["s"]
    else:
        model = save_tiny(tmp_path / "tiny")
    run = write_manifest(tmp_path / "run.toml", foreign_wait_s=0.5)
    meet = ("bootstrap", "--listen", there.listen)
    with started(tmp_path / "meeting", *meet, on=there.inside()) as meeting, recorded(here, tmp_path / "said") as said:
        join = (
            "join",
            "--model",
            str(model),
            "--run",
            str(run),
            "--engine",
            engine,
        )
        peers = ("--peers", meeting.first_line(), "--listen", here.listen)
        with started(tmp_path / "node", *join, *peers, on=here.inside()) as node:
            node.wait_for(lambda: len(node.events("step")) >= 1, timeout_s=START_S)
            assert_switched_off(node)
            node.stop()
        outside = said() - set(NEAR_ONLY)
    assert outside, "it was never connected"
    assert {line for line in outside if not line.startswith(f"tcp {there.address}:")} == set()


def assert_switched_off(node: RunningNode) -> None:
    """Each process of the node has every switch in its environment."""
    for process in node.processes():
        environment = process.environ()
        wrong = {name for name, value in NO_TELEMETRY.items() if environment.get(name) != value}
        if process.pid != node.process.pid:  # set for those that it starts; its own is read at its start
            assert not wrong, (process.cmdline(), wrong)
        if any("worker" in word for word in process.cmdline()[1:3]):
            assert WORKERS_STAY_OFFLINE.items() <= environment.items()
