"""A process of its own for all attackers, so that they take no time of the honest senders' event loop.

    python -m tests.attacks.endurance.attackers CONFIG   # JSON: pid, home, log, model, seed, minutes, without

It attacks from `on` to `off` on its standard input and ends with the input. It answers in lines of JSON: `quiet` once
everything has stopped, `member` for each identity that attacks as a member, `count` for what was done, `error` where an
attacker itself failed.
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
LOOK_S = 0.5


class Attackers:
    """Workers that each take the kind that is furthest behind a day's worth, with some chance in it."""

    def __init__(self, config: dict[str, Any], sockets: Path) -> None:
        """`config["minutes"]` of attack are to hold one day's actions."""
        self._rng = random.Random(config["seed"])
        self._config, self._sockets = config, sockets
        without = tuple(config["without"])
        self.kinds = [kind for kind in all_kinds() if not any(word in kind.name for word in without)]
        self.done: Counter[str] = Counter()
        self._given: Counter[str] = Counter()  # with what is under way
        self._typical: dict[str, int] = {}  # actions of one go, as far as is known
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
        """Ends all attacks that are under way; what they had done is not counted."""
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
            if kind is None:  # ahead of a day's worth
                await asyncio.sleep(LOOK_S)
                continue
            expected = self._typical.get(kind.name, 1)
            self._given[kind.name] += expected
            try:
                await self._attack(kind)
            finally:
                self._given[kind.name] -= expected

    def _next(self) -> Kind | None:
        now_s = time.monotonic() - self._began_at if self._began_at is not None else 0.0
        due = (self._attacked_s + now_s) / (60 * self._config["minutes"])
        shares = {kind.name: (self.done[kind.name] + self._given[kind.name]) / kind.per_day for kind in self.kinds}
        behind = [kind for kind in self.kinds if shares[kind.name] < due]
        return min(behind, key=lambda kind: shares[kind.name] * self._rng.uniform(0.5, 1.5)) if behind else None

    async def _attack(self, kind: Kind) -> None:
        def note(peer_id: str) -> None:
            tell("member", peer=peer_id, attack=kind.name, liar=kind.is_liar)

        scene = Scene(self._victim, self._maker, self._sockets, self._rng, note, self._numbers)
        try:
            async with asyncio.timeout(kind.limit_s):
                done = await kind.act(scene)
        except Exception as error:  # the node, or this machine, kept the attacker from its work
            tell("error", attack=kind.name, error=f"{type(error).__name__}: {error}"[:300])
            self._given[kind.name] += 1  # another one's turn, also where it fails each time
            return
        self._typical[kind.name] = done
        self.done[kind.name] += done
        tell("count", attack=kind.name, actions=done)


def tell(what: str, **about: Any) -> None:
    """One line for whoever started this process."""
    sys.stdout.write(json.dumps({"what": what, **about}) + "\n")
    sys.stdout.flush()


async def attack(config: dict[str, Any]) -> None:
    """Until the standard input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    with tempfile.TemporaryDirectory(prefix="fta") as sockets:
        attackers = Attackers(config, Path(sockets))
        tell("ready", per_day={kind.name: kind.per_day for kind in attackers.kinds})
        try:
            while order := (await reader.readline()).strip():
                if order == b"on":
                    attackers.on()
                else:
                    await attackers.off()
                    tell("quiet")
        finally:
            await attackers.off()


if __name__ == "__main__":
    asyncio.run(attack(json.loads(sys.argv[1])))
