"""Sampling of the node every few seconds: processes and files as in `bench/soak.py`, and peers."""

from __future__ import annotations

import asyncio
import csv
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BENCH = str(Path(__file__).parents[3] / "bench")
if BENCH not in sys.path:
    sys.path.insert(0, BENCH)

from ftis_node.config.home import Home  # noqa: E402
from ftis_node.errors import FtisError  # noqa: E402
from ftis_node.node.http_api.node_client import read_document  # noqa: E402
from soaking.sampling import Point, Sampler, sample_machine  # noqa: E402  in the path that is added above
from soaking.swarm import Node  # noqa: E402
from tests.attacks.member import Member  # noqa: E402
from tests.attacks.victim import Victim  # noqa: E402

EVERY_S = 10.0
ANSWER_S, NUM_TRIES = 30.0, 4  # on a busy machine


@dataclass
class Seen:
    """Samples, and the newest row of each peer. A node forgets peers that left long ago, so rows are kept here."""

    points: list[Point] = field(default_factory=list)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    banned: set[str] = field(default_factory=set)
    unanswered: int = 0


class Watch:
    """A sampler that fills `seen` and the file `samples.csv` until cancelled."""

    def __init__(self, victim: Victim, out: Path) -> None:
        self.seen = Seen()
        self._victim, self._out = victim, out
        self._home = Home(victim.node.home)
        # `Sampler` uses only the process and the home of a node
        self._sampler = Sampler(Node("victim", victim.node, self._home))  # type: ignore[arg-type]
        self._began_at = time.monotonic()

    async def run(self) -> None:
        """Sample until cancelled or until the node ends."""
        with (self._out / "samples.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Point._fields)
            while self._victim.node.process.poll() is None:
                minute = round((time.monotonic() - self._began_at) / 60, 3)
                points = [*await self._sample(minute), *sample_machine(minute)]
                self.seen.points += points
                writer.writerows(points)
                file.flush()
                await self.read_peers()
                await asyncio.sleep(EVERY_S)

    async def _sample(self, minute: float) -> list[Point]:
        try:
            return await asyncio.to_thread(self._sampler.sample, minute)
        except OSError:
            self.seen.unanswered += 1
            return []

    async def read_peers(self) -> None:
        """Keep each peer's row, and the ids of banned peers."""
        try:
            rows = await asyncio.to_thread(read_document, self._home, "/peers", timeout_s=ANSWER_S)
        except FtisError:
            self.seen.unanswered += 1
            return
        for row in rows:
            self.seen.rows[row["peer_id"]] = row
            if row["standing"] == "banned":
                self.seen.banned.add(row["peer_id"])

    async def admitted(self, honest: Sequence[Member]) -> tuple[int, int]:
        """Return the number of admitted honest groups and the learner's step."""
        document = await self.status()
        await self.read_peers()
        groups = sum(self.seen.rows.get(one.peer_id, {}).get("groups_accepted", 0) for one in honest)
        return groups, int(document.get("learner", {}).get("step", 0))

    async def status(self) -> dict[str, Any]:
        """Return `status --json`, with retries because a node on a busy machine may not answer."""
        for _ in range(NUM_TRIES):
            try:
                return dict(await asyncio.to_thread(read_document, self._home, "/status", timeout_s=ANSWER_S))
            except FtisError:
                self.seen.unanswered += 1
        return {}
