"""A small real swarm on this machine: a bootstrap node and three `ftis-node join` with two different tiny models.

Every node announces the address of a separate proxy (`proxy.py`), so a link can be cut or delayed from outside:

    node a --dials--> proxy of b --> node b          (127.0.0.1: proxies)      (127.0.0.1x: nodes)

A node is always started by the same command, as a service manager does. With roles, one node generates and trains, one
only trains, and one only generates, with the weights of the second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.errors import FtisError
from ftis_node.node.http_api.node_client import read_document
from tests.chaos.faults.moved_clock import offset_file_of, prefix
from tests.chaos.proxy import Proxy
from tests.node.support import RunningNode, free_port, started

POLL_S = 0.2
START_S = 600.0  # a busy machine
STOP_S = 120.0  # an idle machine needs at most ten
OWN_GROUPS = 4
MODELS = {"a": "s", "b": "m", "c": "s"}  # the size of the model, by node
ROLES = {"a": "learner", "b": "full", "c": "generator"}  # by node, in a swarm with roles; c follows a
MANIFEST = RunManifest(
    name="chaos",
    task="arithmetic",
    sampling={"group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 6, "max_total_tokens": 48},
    step={"own_groups": OWN_GROUPS, "foreign_groups": 4, "foreign_wait_s": 4.0},
    optimizer={"learning_rate": 0.0001},
    eval={"every_steps": 0},
    wire={"announcement_shards": 1},
)
# Two cores are enough with one thread per worker.
SETTINGS = """
announce = ["{announced}"]
[generation]
threads = 1
[learner]
threads = 1
checkpoint_every_steps = 1
"""
PROCESS_ROLES = {  # by a word of the command line, or a part of the program's name
    "ftis_node.generation.worker": "generation worker",
    "ftis_node.learner.worker": "learner worker",
    "p2pd": "p2pd",
    "EngineCore": "engine core",
}
CONSTANTS = {
    "ftis_node.node.loops.directory.RECORD_PERIOD_S": 5.0,
    "ftis_node.node.startup.worker_boots.ENGINE_CORE": "separate",  # faults kill it
}


def role_of(process: psutil.Process, *, daemon_pid: int) -> str:
    """Return `daemon`, one of `PROCESS_ROLES`, or `other`. Raises psutil.NoSuchProcess."""
    if process.pid == daemon_pid:
        return "daemon"
    words = [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    name = Path(words[0]).name if words else process.name()
    return next((role for mark, role in PROCESS_ROLES.items() if mark in words or mark in name), "other")


class SwarmNode:
    """One node: its home, its command and its current process."""

    def __init__(self, name: str, home: Path, arguments: tuple[str, ...], proxy: Proxy, *, role: str = "full") -> None:
        self.name, self.home, self.arguments, self.proxy, self.role = name, home, arguments, proxy, role
        self._running = ExitStack()
        self._starting = threading.Lock()
        self._is_closed = False
        self._process: RunningNode | None = None

    @property
    def process(self) -> RunningNode:
        """The process of the last start; it may have ended."""
        assert self._process is not None, f"node {self.name} was never started"
        return self._process

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.process.poll() is None

    @property
    def pid(self) -> int:
        return self.process.process.pid

    def start(self) -> None:
        """Start the node and return at once. Raises RuntimeError if the swarm is over."""
        with self._starting:
            if self._is_closed:
                raise RuntimeError(f"node {self.name} is not started: the swarm is over")
            assert not self.is_running
            self.close()
            self._process = self._running.enter_context(
                started(self.home, *self.arguments, on=prefix(offset_file_of(self.home)), constants=CONSTANTS)
            )

    def stop(self, number: int = signal.SIGTERM, *, timeout_s: float = STOP_S) -> int:
        """Send a signal, wait for the daemon's end and return its exit code."""
        os.kill(self.pid, number)
        return self.process.wait(timeout_s=timeout_s)

    def close(self) -> None:
        """Kill the remaining processes of the node."""
        self._running.close()

    def end(self) -> None:
        """Kill the node finally: a later `start`, also in another thread, raises an error."""
        with self._starting:
            self._is_closed = True
            self.close()

    def roles(self) -> dict[str, list[psutil.Process]]:
        """Return the running processes by role: daemon, generation worker, learner worker, p2pd, engine core, other."""
        found: dict[str, list[psutil.Process]] = {}
        with contextlib.suppress(psutil.NoSuchProcess, AssertionError):
            for process in self.process.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.setdefault(role_of(process, daemon_pid=self.pid), []).append(process)
        return found

    def status(self, section: str, name: str) -> Any:
        """Return a value of `/status` from the node's HTTP port; None if it does not answer."""
        with contextlib.suppress(FtisError, OSError):
            if Home(self.home).running_url() is not None:
                return read_document(Home(self.home), "/status")[section][name]
        return None

    def is_ready(self) -> bool:
        """Return whether the status is `running` and the workers of the role are ready."""
        workers = {self.status("generation", "state"), self.status("learner", "state")}
        return self.status("node", "state") == "running" and workers <= {"ready", "off"}

    def progress(self) -> int | None:
        """Return the last step by `/status`; None if it does not answer.

        For a generator it is the number of steps whose groups other nodes have acknowledged.
        """
        if self.role != "generator":
            return self.status("learner", "step")
        num_confirmed = self.status("swarm", "groups_confirmed")
        return None if num_confirmed is None else num_confirmed // OWN_GROUPS

    def wait_for(self, condition: Callable[[], Any], *, timeout_s: float) -> Any:
        """Wait until `condition` is true and return its value; None after the timeout or the daemon's end."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.is_running:
            if found := condition():
                return found
            time.sleep(POLL_S)
        return condition() if self.is_running else None

    def last_log_line(self) -> str:
        lines = self.process.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


class Swarm:
    """The bootstrap node and the nodes. `with Swarm(folder, models).running() as swarm` starts them.

    With `vllm` the first node generates with vLLM, whose engine core is a separate process. With `roles` the nodes have
    different roles.
    """

    def __init__(
        self, folder: Path, models: Mapping[str, Path], *, vllm: bool = False, roles: bool = False, num_nodes: int = 3
    ) -> None:
        self.folder, self.models, self._vllm, self._num_nodes = folder, dict(models), vllm, num_nodes
        self._roles = ROLES if roles else {}
        self.nodes: list[SwarmNode] = []
        self.bootstrap: SwarmNode
        self.bootstrap_lock = threading.Lock()  # one fault at a time affects the bootstrap node
        self._stack = ExitStack()

    @contextlib.contextmanager
    def running(self) -> Iterator[Swarm]:
        """Yield the swarm when every node has made progress; kill all its processes at the end."""
        with self._stack:
            self._start()
            yield self

    def node(self, name: str) -> SwarmNode:
        return next(node for node in self.nodes if node.name == name)

    def neighbors(self, node: SwarmNode) -> list[SwarmNode]:
        return [other for other in self.nodes if other is not node]

    def _start(self) -> None:
        run = self.folder / "run.toml"
        run.write_text(MANIFEST.to_toml())
        self.bootstrap, address = self._start_bootstrap()
        for position, (name, size) in enumerate(islice(MODELS.items(), self._num_nodes)):
            arguments = ("--model", str(self.models[size]), "--run", str(run), "--peers", address, "--name", name)
            if self._vllm and position == 0:
                arguments += ("--engine", "vllm")
            role = self._roles.get(name, "full")
            arguments += ("--seed", str(position), "--role", role)
            if role == "generator":
                arguments += ("--follow", self._learner_peer_id())
            self.nodes.append(node := self._make(name, position + 2, "join", *arguments, role=role))
            node.start()
        for node in self.nodes:
            assert node.wait_for(lambda node=node: node.progress() or 0, timeout_s=START_S), node.last_log_line()

    def _learner_peer_id(self) -> str:
        learner = next(node for node in self.nodes if node.role == "learner")
        assert learner.wait_for(learner.is_ready, timeout_s=START_S), learner.last_log_line()
        return str(learner.status("node", "peer_id"))

    def _start_bootstrap(self) -> tuple[SwarmNode, str]:
        bootstrap = self._make("bootstrap", 1, "bootstrap", "--address-file", str(self.folder / "address"))
        bootstrap.arguments += ("--announce", bootstrap.proxy.address)
        bootstrap.start()
        peer = bootstrap.process.first_line().rpartition("/p2p/")[2]
        return bootstrap, f"{bootstrap.proxy.address}/p2p/{peer}"

    def _make(self, name: str, number: int, command: str, *arguments: str, role: str = "full") -> SwarmNode:
        """Return a node that listens on 127.0.0.(10 + number), with its proxy."""
        host = f"127.0.0.{10 + number}"
        port = free_port(host)
        proxy = self._stack.enter_context(Proxy.open(to=(host, port)))
        home = self.folder / name
        home.mkdir()
        if command == "join":
            (home / "node.toml").write_text(SETTINGS.format(announced=proxy.address))
        listen = ("--listen", f"/ip4/{host}/tcp/{port}")
        node = SwarmNode(name, home, (command, *arguments, *listen), proxy, role=role)
        self._stack.callback(node.end)
        return node
