"""A small real swarm: a meeting point and three `ftis-node join` with two unlike tiny models, all on this machine.

Every node announces itself by a line (`line.py`) of its own, so a link can be cut or delayed without the node's help:

    node a --dials--> line of b --> node b          (127.0.0.1: lines)      (127.0.0.1x: nodes)

Nodes are started by the same command each time, as a service manager would. With roles, one of the three generates
for itself and trains, one only trains, and one only generates, with the weights of the one that only trains.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import psutil

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.errors import FtisError
from ftis_node.node.http_api.node_client import read_document
from tests.chaos.faults.moved_clock import offset_file_of, prefix
from tests.chaos.line import Line
from tests.chaos.observing.processes import role_of
from tests.node.support import RunningNode, free_port, started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

LOOK_S = 0.2
START_S = 600.0  # a busy machine
STOP_S = 120.0  # ten are promised of an idle machine
OWN_GROUPS = 4
MODELS = {"a": "s", "b": "m", "c": "s"}  # by node: the size of its model
ROLES = {"a": "learner", "b": "full", "c": "generator"}  # by node, in a swarm with roles: c follows a
MANIFEST = RunManifest(
    name="chaos",
    task="arithmetic",
    sampling={"group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 6, "max_total_tokens": 48},
    step={"own_groups": OWN_GROUPS, "foreign_groups": 4, "foreign_wait_s": 4.0},
    optimizer={"learning_rate": 0.0001},
    eval={"every_steps": 0},
    wire={"announcement_shards": 1},
)
# Light enough for two cores: one thread a worker, a checkpoint each step, small trails.
SETTINGS = """
announce = ["{announced}"]
[generation]
threads = 1
engine_core = "separate"
[learner]
threads = 1
checkpoint_every_steps = 1
[swarm]
directory_period_s = 5.0
"""


class SwarmNode:
    """One node: its home, its command, and its process while it runs."""

    def __init__(self, name: str, home: Path, arguments: tuple[str, ...], line: Line, *, role: str = "full") -> None:
        self.name, self.home, self.arguments, self.line, self.role = name, home, arguments, line, role
        self._running = ExitStack()
        self._starting = threading.Lock()
        self._is_over = False
        self._process: RunningNode | None = None
        self.num_starts = 0

    @property
    def process(self) -> RunningNode:
        """The process of its last start, be it that it has ended."""
        assert self._process is not None, f"node {self.name} was never started"
        return self._process

    @property
    def is_running(self) -> bool:
        """Whether the daemon lives."""
        return self._process is not None and self._process.process.poll() is None

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        return self.process.process.pid

    def start(self) -> None:
        """Starts it by its command. Returns at once. Raises RuntimeError where the swarm is over."""
        with self._starting:
            if self._is_over:
                raise RuntimeError(f"node {self.name} is not started: the swarm is over")
            assert not self.is_running
            self.close()
            self._process = self._running.enter_context(
                started(self.home, *self.arguments, on=prefix(offset_file_of(self.home)))
            )
            self.num_starts += 1

    def stop(self, number: int = signal.SIGTERM, *, timeout_s: float = STOP_S) -> int:
        """Sends a signal, waits for the daemon's end and gives its exit code."""
        os.kill(self.pid, number)
        return self.process.wait(timeout_s=timeout_s)

    def close(self) -> None:
        """Kills what is left of it."""
        self._running.close()

    def end(self) -> None:
        """Kills it for good: whoever plays faults on it in another thread starts it no more."""
        with self._starting:
            self._is_over = True
            self.close()

    def roles(self) -> dict[str, list[psutil.Process]]:
        """Its living processes by role: daemon, generation worker, learner worker, p2pd, engine core, other."""
        found: dict[str, list[psutil.Process]] = {}
        with contextlib.suppress(psutil.NoSuchProcess, AssertionError):
            for process in self.process.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.setdefault(role_of(process, daemon_pid=self.pid), []).append(process)
        return found

    def status(self) -> dict[str, Any] | None:
        """`/status` as its own HTTP port says it now; None where nobody answers there."""
        try:
            if Home(self.home).running_url() is None:
                return None
            return dict(read_document(Home(self.home), "/status"))
        except (FtisError, OSError):
            return None

    def is_well(self) -> bool:
        """Whether it says that it runs, with the workers of its role ready."""
        status = self.status()
        return (
            status is not None
            and status["node"]["state"] == "running"
            and {status["generation"]["state"], status["learner"]["state"]} <= {"ready", "off"}
        )

    def work(self) -> int | None:
        """The step it says that its learner has done last, or how many steps' groups others have of one that only
        generates; None where nobody answers."""
        if (status := self.status()) is None:
            return None
        if self.role == "generator":
            return int(status["swarm"]["groups_confirmed"]) // OWN_GROUPS
        return int(status["learner"]["step"])

    def wait_for(self, condition: Callable[[], Any], *, timeout_s: float) -> Any:
        """What `condition` gives as soon as it is true; None when the time is over or the daemon ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.is_running:
            if found := condition():
                return found
            time.sleep(LOOK_S)
        return condition() if self.is_running else None

    def last_words(self) -> str:
        """The last line of its log."""
        lines = self.process.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


class Swarm:
    """The meeting point and the nodes. `with Swarm.running(folder, models) as swarm`."""

    def __init__(self, folder: Path, models: Mapping[str, Path], *, vllm: bool = False, roles: bool = False) -> None:
        self.folder, self.models, self._vllm = folder, dict(models), vllm
        self._roles = ROLES if roles else {}
        self.nodes: list[SwarmNode] = []
        self.meeting_point: SwarmNode
        self.at_the_meeting_point = (
            threading.Lock()
        )  # one fault at a time is done to it, whichever node it is meant for
        self._stack = ExitStack()

    @classmethod
    @contextlib.contextmanager
    def running(
        cls, folder: Path, models: Mapping[str, Path], *, vllm: bool = False, roles: bool = False
    ) -> Iterator[Swarm]:
        """A swarm in which every node is at work; killed with all it started when the block ends.

        With `vllm` the first node generates by vLLM, whose core is a process of its own. With `roles` each has its own.
        """
        swarm = cls(folder, models, vllm=vllm, roles=roles)
        with swarm._stack:
            swarm._start()
            yield swarm

    def node(self, name: str) -> SwarmNode:
        return next(node for node in self.nodes if node.name == name)

    def neighbors(self, node: SwarmNode) -> list[SwarmNode]:
        """All other nodes."""
        return [other for other in self.nodes if other is not node]

    def _start(self) -> None:
        run = self.folder / "run.toml"
        run.write_text(MANIFEST.to_toml())
        self.meeting_point, address = self._start_meeting_point()
        for position, (name, size) in enumerate(MODELS.items()):
            arguments = ("--model", str(self.models[size]), "--run", str(run), "--peers", address, "--name", name)
            if self._vllm and position == 0:
                arguments += ("--engine", "vllm")
            role = self._roles.get(name, "full")
            arguments += ("--seed", str(position), "--role", role)
            if role == "generator":
                arguments += ("--follow", self._peer_id_of_the_learner())
            self.nodes.append(node := self._make(name, position + 2, "join", *arguments, role=role))
            node.start()
        for node in self.nodes:
            assert node.wait_for(lambda node=node: node.work() or 0, timeout_s=START_S), node.last_words()

    def _peer_id_of_the_learner(self) -> str:
        learner = next(node for node in self.nodes if node.role == "learner")
        assert learner.wait_for(learner.is_well, timeout_s=START_S), learner.last_words()
        return str((learner.status() or {})["node"]["peer_id"])

    def _start_meeting_point(self) -> tuple[SwarmNode, str]:
        meeting_point = self._make("meet", 1, "bootstrap", "--address-file", str(self.folder / "address"))
        meeting_point.arguments += ("--announce", meeting_point.line.address)
        meeting_point.start()
        peer = meeting_point.process.first_line().rpartition("/p2p/")[2]
        return meeting_point, f"{meeting_point.line.address}/p2p/{peer}"

    def _make(self, name: str, number: int, command: str, *arguments: str, role: str = "full") -> SwarmNode:
        """A node that listens on 127.0.0.1<number>, and its line."""
        host = f"127.0.0.{10 + number}"
        port = free_port(host)
        line = self._stack.enter_context(Line.open(to=(host, port)))
        home = self.folder / name
        home.mkdir()
        if command == "join":
            (home / "node.toml").write_text(SETTINGS.format(announced=line.address))
        listen = ("--listen", f"/ip4/{host}/tcp/{port}")
        node = SwarmNode(name, home, (command, *arguments, *listen), line, role=role)
        self._stack.callback(node.end)
        return node
