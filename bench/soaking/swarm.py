"""A bootstrap node and nodes of `ftis-node join` on this machine.

Nodes alternate between two different tiny models, with the torch engine, one thread for each worker and small groups.
The learner goes through a step in tiny pieces. So a step takes about a second, as does the generation of its groups.
Two cores can then bear ten times the normal traffic. The disk limits are so low that the nodes reach them during the
warm-up.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.lab.child_processes import ChildProcess, ChildProcesses, children
from ftis_node.lab.tiny import make_tiny

START_LIMIT_S = 900.0  # on a loaded machine
POLL_INTERVAL_S = 0.5
ASK_LIMIT_S = 30.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "FTIS_GENERATION__THREADS": "1",
    "FTIS_LEARNER__THREADS": "1",
}
MODELS = {"s": 0.3, "m": 0.3}  # sizes, and the share of their usual training, because accuracy does not matter
# A step waits fifteen seconds for more foreign groups than its peers make, then starts. So normal traffic needs a tenth
# of two cores, and the figures would show nodes that get faster or slower.
MANIFEST = RunManifest(
    name="soak",
    task="arithmetic",
    sampling={"group_size": 8, "max_prompt_tokens": 32, "max_completion_tokens": 32, "max_total_tokens": 64},
    step={"own_groups": 4, "foreign_groups": 64, "foreign_wait_s": 15.0, "max_age_s": 120.0},
    optimizer={"learning_rate": 1e-5},
    eval={"every_steps": 50, "limit": 32},
)
SETTINGS = """
[buffer]
max_disk_bytes = 262144
[learner]
micro_batch_tokens = 64
"""


@dataclass(frozen=True, slots=True)
class Node:
    """One running node, observed from outside."""

    name: str
    child: ChildProcess
    home: Home

    def processes(self) -> list[psutil.Process]:
        """Return the node's process and its descendants."""
        daemon = psutil.Process(self.child.process.pid)
        return [daemon, *daemon.children(recursive=True)]

    @property
    def has_port(self) -> bool:
        """Return whether it has a local port, unlike a bootstrap node."""
        return self.home.running_url() is not None

    def ask(self, path: str) -> bytes:
        """Send a GET request to its local port. Raises OSError if it does not answer."""
        with urlopen(f"{self.home.running_url()}{path}", timeout=ASK_LIMIT_S) as answer:
            return bytes(answer.read())

    def status(self) -> dict[str, Any]:
        """Return its status, as `status --json`."""
        document: dict[str, Any] = json.loads(self.ask("/status"))
        return document


def make_models(folder: Path) -> list[Path]:
    """Return the tiny models. Those of an earlier soak in the same folder are used again."""
    paths = [folder / f"tiny-{size}" for size in MODELS]
    for (size, scale), path in zip(MODELS.items(), paths, strict=True):
        if not (path / "config.json").exists():
            make_tiny(size, path, scale=scale)
    return paths


@contextmanager
def swarm(folder: Path, num_nodes: int) -> Iterator[tuple[str, list[Node]]]:
    """Yield the bootstrap node's address and all running nodes, with the bootstrap node first."""
    os.environ.update(ENVIRONMENT)
    manifest = folder / "run.toml"
    manifest.write_text(MANIFEST.to_toml())
    models = make_models(folder)
    with children(folder / "logs") as started:
        home = folder / "bootstrap"
        child = started.bootstrap(home)
        address = child.wait_for_line(timeout_s=START_LIMIT_S)
        nodes = [Node("bootstrap", child, Home(home))]
        for number in range(num_nodes):
            model = models[number % len(models)]
            nodes.append(_join(started, folder / f"node-{number}", model, manifest=manifest, address=address))
        for node in nodes[1:]:
            _wait_for_first_step(node)
        yield address, nodes


def _join(started: ChildProcesses, home: Path, model: Path, *, manifest: Path, address: str) -> Node:
    home.mkdir(parents=True, exist_ok=True)
    (home / "node.toml").write_text(SETTINGS)
    child = started.join(home.name, home=home, peer=address, model=model, run=manifest, engine="torch")
    return Node(home.name, child, Home(home))


def _wait_for_first_step(node: Node) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if node.child.exit_code is not None:
            raise RuntimeError(f"{node.name} ended: {node.child.last_words()}")
        if node.has_port and node.status()["learner"]["step"] > 0:
            return
        time.sleep(POLL_INTERVAL_S)
    raise RuntimeError(f"{node.name} made no step in {START_LIMIT_S:.0f} s: {node.child.last_words()}")
