"""A separate process for all attackers, so that they take no time of the honest senders' event loop.

    python -m tests.attacks.endurance.attackers CONFIG   # JSON: pid, home, log, model, seed, minutes, without

It attacks from the line `on` to the line `off` of its standard input, and ends with the input. It prints lines of
JSON. `ready` has the kinds with their actions per day. `quiet` means that all attacks have stopped. `member` has the
identity of an attacking member. `count` has the actions of an attack that ended. `error` means that an attacker failed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.stubs.group_maker import GroupMaker
from ftis_node.config.manifest import load_manifest
from tests.attacks.endurance.kinds import all_kinds
from tests.attacks.endurance.target import OtherProcess, Scene
from tests.attacks.victim import Victim
from tests.node.support import RunningNode

if TYPE_CHECKING:
    from tests.attacks.endurance.kinds import Kind

NUM_AT_ONCE = 10
POLL_S = 0.5


class Attackers:
    """Workers that take the kind that is furthest behind its actions per day, with some randomness."""

    def __init__(self, config: dict[str, Any], sockets: Path) -> None:
        """Plan one day's actions for `config["minutes"]` of attack."""
        self._rng = random.Random(config["seed"])
        self._config, self._sockets = config, sockets
        without = tuple(config["without"])
        self.kinds = [kind for kind in all_kinds() if not any(word in kind.name for word in without)]
        self.done: Counter[str] = Counter()
        self._pending: Counter[str] = Counter()  # expected actions of attacks that run
        self._per_attack: dict[str, int] = {}  # actions of the last attack of a kind
        self._attacked_s = 0.0
        node = RunningNode(OtherProcess(config["pid"]), Path(config["home"]), Path(config["log"]))  # type: ignore[arg-type]
        self._victim = Victim(node)
        self._maker = GroupMaker(Path(config["model"]), load_manifest(config["manifest"]))
        self._numbers = itertools.count()
        self._workers: list[asyncio.Task[None]] = []
        self._began_at: float | None = None

    def on(self) -> None:
        self._began_at = time.monotonic()
        self._workers = [asyncio.create_task(self._work()) for _ in range(NUM_AT_ONCE)]

    async def off(self) -> None:
        """Cancel all attacks that run, without counting their actions."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._workers = []
        if self._began_at is not None:
            self._attacked_s += time.monotonic() - self._began_at
            self._began_at = None

    async def _work(self) -> None:
        while True:
            kind = self._next()
            if kind is None:  # all kinds are ahead
                await asyncio.sleep(POLL_S)
                continue
            expected = self._per_attack.get(kind.name, 1)
            self._pending[kind.name] += expected
            try:
                await self._attack(kind)
            finally:
                self._pending[kind.name] -= expected

    def _next(self) -> Kind | None:
        now_s = time.monotonic() - self._began_at if self._began_at is not None else 0.0
        due = (self._attacked_s + now_s) / (60 * self._config["minutes"])
        shares = {kind.name: (self.done[kind.name] + self._pending[kind.name]) / kind.per_day for kind in self.kinds}
        behind = [kind for kind in self.kinds if shares[kind.name] < due]
        return min(behind, key=lambda kind: shares[kind.name] * self._rng.uniform(0.5, 1.5)) if behind else None

    async def _attack(self, kind: Kind) -> None:
        def note(peer_id: str) -> None:
            report("member", peer=peer_id, attack=kind.name, malicious=kind.is_malicious)

        scene = Scene(self._victim, self._maker, self._sockets, self._rng, note, self._numbers)
        try:
            async with asyncio.timeout(kind.limit_s):
                done = await kind.act(scene)
        except Exception as error:  # of the node or of this machine
            report("error", attack=kind.name, error=f"{type(error).__name__}: {error}"[:300])
            self._pending[kind.name] += 1  # another kind is next, even if this one always fails
            return
        self._per_attack[kind.name] = done
        self.done[kind.name] += done
        report("count", attack=kind.name, actions=done)


def report(message_type: str, **fields: Any) -> None:
    """Print one line for the parent process."""
    sys.stdout.write(json.dumps({"type": message_type, **fields}) + "\n")
    sys.stdout.flush()


async def attack(config: dict[str, Any]) -> None:
    """Attack until the standard input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    with tempfile.TemporaryDirectory(prefix="fta") as sockets:
        attackers = Attackers(config, Path(sockets))
        report("ready", per_day={kind.name: kind.per_day for kind in attackers.kinds})
        try:
            while order := (await reader.readline()).strip():
                if order == b"on":
                    attackers.on()
                else:
                    await attackers.off()
                    report("quiet")
        finally:
            await attackers.off()


if __name__ == "__main__":
    asyncio.run(attack(json.loads(sys.argv[1])))
