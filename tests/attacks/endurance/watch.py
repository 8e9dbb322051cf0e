"""Looks at the node every few seconds from outside: its processes and files as `bench/soak.py` does, and its peers."""

from __future__ import annotations

import asyncio
import csv
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

BENCH = str(Path(__file__).parents[3] / "bench")
if BENCH not in sys.path:
    sys.path.insert(0, BENCH)

from ftis_node.config.home import Home  # noqa: E402
from ftis_node.errors import FtisError  # noqa: E402
from ftis_node.node.http_api.node_client import read_document  # noqa: E402
from soaking.sampling import Point, Sampler, look_at_machine  # noqa: E402  found by the path above
from soaking.swarm import Node  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

EVERY_S = 10.0
ANSWER_S, NUM_TRIES = 30.0, 4  # of a busy machine


@dataclass
class Seen:
    """What the looks at the peers came to. Rows are kept, for a node forgets peers that are long gone."""

    points: list[Point] = field(default_factory=list)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    banned: set[str] = field(default_factory=set)
    unanswered: int = 0


class Watch:
    """Looks until cancelled, into `seen` and the file `samples.csv`."""

    def __init__(self, victim: Victim, out: Path) -> None:
        self.seen = Seen()
        self._victim, self._out = victim, out
        self._home = Home(victim.node.home)
        # `Sampler` wants the process and the home of a node, and this one has both
        self._sampler = Sampler(Node("victim", victim.node, self._home))  # type: ignore[arg-type]
        self._began_at = time.monotonic()

    async def run(self) -> None:
        """Until cancelled, or the node has ended."""
        with (self._out / "samples.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Point._fields)
            while self._victim.node.process.poll() is None:
                minute = round((time.monotonic() - self._began_at) / 60, 3)
                points = [*await self._look(minute), *look_at_machine(minute)]
                self.seen.points += points
                writer.writerows(points)
                file.flush()
                await self.look_at_peers()
                await asyncio.sleep(EVERY_S)

    async def _look(self, minute: float) -> list[Point]:
        try:
            return await asyncio.to_thread(self._sampler.look, minute)
        except OSError:
            self.seen.unanswered += 1
            return []

    async def look_at_peers(self) -> None:
        """Notes each peer's row and whether it was ever banned."""
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
        """Groups of the honest senders so far, and the learner's step."""
        document = await self.status()
        await self.look_at_peers()
        groups = sum(self.seen.rows.get(one.peer_id, {}).get("groups_accepted", 0) for one in honest)
        return groups, int(document.get("learner", {}).get("step", 0))

    async def status(self) -> dict[str, Any]:
        """`status --json`; tries again where a busy machine keeps the node from answering."""
        for _ in range(NUM_TRIES):
            try:
                return dict(await asyncio.to_thread(read_document, self._home, "/status", timeout_s=ANSWER_S))
            except FtisError:
                self.seen.unanswered += 1
        return {}
