"""Real nodes for tests: `ftis-node` as a process, its home and its log."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from ftis_node.config.home import Home
from ftis_node.node.http_api.node_client import read_document
from ftis_node.telemetry.events import read_events
from tests.node.supervision.constants import CONSTANTS

STOP_LIMIT_S = 10.0
FIRST_LINE_S = 240.0  # a busy machine
ANY_PORT = "/ip4/127.0.0.1/tcp/0"
MANIFEST = """
name = "test"
task = "arithmetic"
[sampling]
group_size = {group_size}
max_prompt_tokens = 32
max_completion_tokens = 6
max_total_tokens = 48
[step]
own_groups = {groups}
foreign_groups = {groups}
foreign_wait_s = {foreign_wait_s}
[optimizer]
learning_rate = 1e-4
[eval]
every_steps = 2
limit = 32
"""


def manifest_text(*, foreign_wait_s: float, groups: int = 4, group_size: int = 4) -> str:
    """Return the manifest of a small run with `groups` own and `groups` foreign groups per step."""
    return MANIFEST.format(foreign_wait_s=foreign_wait_s, groups=groups, group_size=group_size)


def write_manifest(path: Path, **how: Any) -> Path:
    """Write `manifest_text` to a file and return its path."""
    path.write_text(manifest_text(**how))
    return path


@dataclass
class RunningNode:
    """One `ftis-node` process and its home."""

    process: subprocess.Popen[bytes]
    home: Path
    log: Path

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        return read_events(self.home / "events.jsonl", name=name)

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the node and of all its descendants."""
        node = psutil.Process(self.process.pid)
        return [node, *node.children(recursive=True)]

    def wait_for(self, condition: Callable[[], Any], *, timeout_s: float) -> Any:
        """Wait until `condition` is true and return its value. Fails if the node ends first or the time is over."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := condition():
                return found
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.05)
        raise AssertionError(f"not within {timeout_s} s: {self.log.read_text()[-3000:]}")

    def first_line(self) -> str:
        """Return the first line that a bootstrap node prints: its address."""
        assert select.select([self.process.stdout], [], [], FIRST_LINE_S)[0], f"no address in {FIRST_LINE_S:.0f} s"
        return self.process.stdout.readline().decode().strip()

    def wait(self, *, timeout_s: float) -> int:
        return self.process.wait(timeout=timeout_s)

    def stop(self, number: int = signal.SIGTERM) -> float:
        """Send a signal, wait for the end, and return the seconds it took. Fails if a process is still running."""
        family = self.processes()
        started_at = time.monotonic()
        os.kill(self.process.pid, number)
        self.process.wait(timeout=STOP_LIMIT_S + 20)
        took_s = time.monotonic() - started_at
        _, alive = psutil.wait_procs(family, timeout=3)
        assert not alive, f"left running: {[process.cmdline() for process in alive]}"
        return took_s

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = read_document(Home(self.home), "/status")
        return document

    def peer_id(self, *, timeout_s: float = FIRST_LINE_S) -> str:
        """Return the peer id as soon as `status` has it; a node that still starts has none."""
        return str(self.wait_for(lambda: self.status()["node"]["peer_id"], timeout_s=timeout_s))

    def peers(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = read_document(Home(self.home), "/peers")
        return rows


@contextmanager
def started(
    home: Path,
    *arguments: str,
    on: Sequence[str] = (),
    module: str = "ftis_node",
    constants: Mapping[str, Any] = MappingProxyType({}),
    **environment: str,
) -> Iterator[RunningNode]:
    """Run `ftis-node ARGUMENTS --home HOME`; kill it and its descendants when the block ends.

    `on` precedes the command and runs it elsewhere, under the same process id. `module` replaces `ftis_node`.
    `constants` replaces constants of the daemon, by their full names.
    """
    home.parent.mkdir(parents=True, exist_ok=True)
    log = home.with_suffix(".log")
    if constants:
        module, environment[CONSTANTS] = "tests.node.supervision.constants", json.dumps(dict(constants))
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*on, sys.executable, "-m", module, *arguments, "--home", str(home)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if arguments[0] == "bootstrap" else output,
            stderr=output,
            # torch starts faster than vLLM. A test of vLLM gives --engine.
            env={"FTIS_ENGINE": "torch", **os.environ, **environment},
        )
    node = RunningNode(process, home, log)
    try:
        yield node
    finally:
        family = node.processes() if process.poll() is None else []
        for member in family:
            with suppress(psutil.NoSuchProcess):  # the workers end with the daemon
                member.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@contextmanager
def bootstrap(home: Path) -> Iterator[str]:
    """Run a bootstrap node and yield its address."""
    with started(home, "bootstrap", "--listen", ANY_PORT) as node:
        yield node.first_line()
