"""The victim: a real `ftis-node join`, and its state as its operator sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.errors import FtisError
from ftis_node.node.http_api.node_client import read_document
from tests.node.support import ANY_PORT, RunningNode, started

POLL_S, READ_EVERY_S = 0.2, 0.25
READY_S = 240.0  # a busy machine
MAX_DISK_BYTES = 8 << 20
MAX_READY_GROUPS = 32
MAX_ENVELOPE_BYTES = 1 << 16
REQUESTS_PER_MINUTE = 120
MANIFEST = RunManifest(
    name="attacked",
    task="arithmetic",
    sampling={"group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 48, "max_total_tokens": 80},
    step={"own_groups": 4, "foreign_groups": 4, "foreign_wait_s": 20.0},
    optimizer={"learning_rate": 0.0001},
    eval={"every_steps": 0},
    wire={"max_envelope_bytes": MAX_ENVELOPE_BYTES, "announcement_shards": 1},
)
# `pull_policy`: the directory lists attackers of earlier tests for a while, and the node must pull all groups.
SETTINGS = f"""
[buffer]
max_disk_bytes = {MAX_DISK_BYTES}
[validation]
audit_fraction = 1.0
audit_folders = true
[swarm]
pull_policy = "all"
"""

# Lower limits than those of a user's node, for short attacks.
CONSTANTS = {
    "ftis_node.swarm.rate_limits.GROUPS_PER_MINUTE": 600.0,
    "ftis_node.swarm.rate_limits.NEW_PEERS_GROUPS_PER_MINUTE": 400.0,
    "ftis_node.config.limits.MAX_READY_GROUPS": MAX_READY_GROUPS, "ftis_node.swarm.duplicates.MIN_LONG_TOKENS": 8,
    "ftis_node.node.loops.directory.RECORD_PERIOD_S": 2.0, "ftis_node.node.loops.pull.PULL_TIMEOUT_S": 10.0,
    "ftis_node.node.startup.factories.MAX_REQUESTS_PER_MINUTE": float(REQUESTS_PER_MINUTE),
}  # fmt: skip


class Document:
    """A document of the node, read at most every `READ_EVERY_S`, because reads for many attackers would slow it down.

    A caller gets a document that was read after its call.
    """

    def __init__(self, home: Home, path: str) -> None:
        self._home, self._path = home, path
        self._read_at = 0.0
        self._next: asyncio.Task[Any] | None = None

    async def read(self) -> Any:
        if self._next is None:
            self._next = asyncio.create_task(self._read_later())
        return await asyncio.shield(self._next)

    async def _read_later(self) -> Any:
        await asyncio.sleep(self._read_at + READ_EVERY_S - time.monotonic())
        self._next, self._read_at = None, time.monotonic()
        return await asyncio.to_thread(read_document, self._home, self._path)


class Victim:
    """Counters, peers, processes and files of the node."""

    def __init__(self, node: RunningNode) -> None:
        self.node = node
        self._status, self._peers = (Document(Home(node.home), path) for path in ("/status", "/peers"))
        self.resident_bytes_before = 0  # before the attacks
        self.honest: Any = None  # a member that keeps sending valid groups

    async def status(self) -> dict[str, Any]:
        """Return the document of `status --json`."""
        return dict(await self._status.read())

    async def addresses(self) -> list[str]:
        return list((await self.status())["node"]["addresses"])

    async def step(self) -> int:
        return int((await self.status())["learner"]["step"])

    async def num_refused(self, reason: str) -> int:
        """Return how many groups and announcements were refused for this reason."""
        return int((await self.status())["swarm"]["groups_refused"].get(reason, 0))

    async def num_errors(self, kind: str, reason: str) -> int:
        return int((await self.status())["swarm"][kind].get(reason, 0))

    async def rows(self) -> list[dict[str, Any]]:
        """Return the rows of `peers --json`."""
        return list(await self._peers.read())

    async def row(self, peer_id: str) -> dict[str, Any]:
        unknown = {"groups_accepted": 0, "groups_refused": {}, "trust_level": None}
        return next((row for row in await self.rows() if row["peer_id"] == peer_id), unknown)

    async def num_accepted(self, peer_id: str) -> int:
        return int((await self.row(peer_id))["groups_accepted"])

    async def num_refused_of(self, peer_id: str, reason: str) -> int:
        """Return how many refusals for this reason the node charged to a peer."""
        return int((await self.row(peer_id))["groups_refused"].get(reason, 0))

    async def is_banned(self, peer_id: str) -> bool:
        return bool((await self.row(peer_id))["trust_level"] == "banned")

    async def until(self, condition: Callable[[], Any], *, within_s: float = 60.0) -> Any:
        """Await `condition` until its result is true, and return that result."""
        deadline = asyncio.get_running_loop().time() + within_s
        while not (found := await none_if_unanswered(condition)):
            assert self.node.process.poll() is None, self.node.log.read_text()[-3000:]
            assert asyncio.get_running_loop().time() < deadline, (await self.status())["swarm"]
            await asyncio.sleep(POLL_S)
        return found

    async def until_above(self, before: int, count: Callable[[], Awaitable[int]], *, within_s: float = 60.0) -> None:
        async def is_above() -> bool:
            return await count() > before

        await self.until(is_above, within_s=within_s)

    async def until_judged(
        self, peer_id: str, count: int, *, repeat: Callable[[], Awaitable[object]] | None = None
    ) -> dict[str, Any]:
        """Wait until the node has accepted or refused `count` groups of a peer, and return the peer's row.

        `repeat` is awaited before each look.
        """

        async def judged() -> dict[str, Any] | None:
            if repeat is not None:
                await repeat()
            row = await self.row(peer_id)
            return row if row["groups_accepted"] + sum(row["groups_refused"].values()) >= count else None

        return dict(await self.until(judged))

    async def until_continued(self) -> None:
        """Wait until the node completes a step and admits a group of the honest peer, whose trust level stays good."""
        peer_id = self.honest.peer_id
        step, accepted = await self.step(), await self.num_accepted(peer_id)
        await self.until_above(step, self.step)
        await self.until_above(accepted, lambda: self.num_accepted(peer_id))
        assert (await self.row(peer_id))["trust_level"] == "good"

    def resident_bytes(self) -> int:
        """Return the memory of the daemon, without its workers, which hold the model."""
        return int(psutil.Process(self.node.process.pid).memory_info().rss)

    def log_text(self) -> str:
        """Return the logs of the node."""
        files = [self.node.log, *sorted(self.node.home.glob("logs/*"))]
        return "".join(file.read_text(errors="replace") for file in files if file.is_file())

    def file_bytes(self, pattern: str) -> int:
        return sum(file.stat().st_size for file in self.node.home.glob(pattern))


async def none_if_unanswered(condition: Callable[[], Any]) -> Any:
    """Return the result of the condition, or None if the node does not answer in time."""
    try:
        return await condition()
    except FtisError:
        return None


@asynccontextmanager
async def running_victim(folder: Path, model: Path, *, manifest: RunManifest = MANIFEST) -> AsyncIterator[Victim]:
    run, home = folder / "run.toml", folder / "home"
    run.write_text(manifest.to_toml())
    home.mkdir()
    (home / "node.toml").write_text(SETTINGS)
    arguments = ("--run", str(run), "--listen", ANY_PORT, "--name", "victim", "--engine", "torch")
    with started(home, "join", "--model", str(model), *arguments, constants=CONSTANTS) as node:
        victim = Victim(node)
        await asyncio.to_thread(node.wait_for, Home(home).running_url, timeout_s=READY_S)
        await victim.until(victim.addresses, within_s=READY_S)
        yield victim
