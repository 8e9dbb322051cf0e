"""A separate process for all attackers, so that they take no time of the honest senders' event loop.

    python -m tests.attacks.endurance.attackers CONFIG   # JSON: pid, home, log, model, manifest, seed, without

It attacks from the line `on` to the line `off` of its standard input, and ends with the input. It prints lines of JSON:

    {"kinds": names}                       it is ready
    {"quiet": true}                        all attacks have stopped
    {"member": id, "kind", "malicious"}    an attacking member
    {"kind", "actions"}                    an attack that ended
    {"kind", "error"}                      an attack that failed
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from bench.stubs.group_maker import GroupMaker
from ftis_node.config.manifest import load_manifest
from tests.attacks.endurance.kinds import Kind, all_kinds
from tests.attacks.member import Scene
from tests.attacks.victim import Victim
from tests.node.support import RunningNode

NUM_AT_ONCE = 10


class OtherProcess:
    """A process of another parent, with the interface of `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)

    def poll(self) -> int | None:
        """Return None while the process runs."""
        is_alive = self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE
        return None if is_alive else -1


def report(**fields: Any) -> None:
    """Print one line for the parent process."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def rounds(kinds: list[Kind], rng: random.Random) -> Iterator[Kind]:
    """Yield all kinds in shuffled rounds, without end."""
    while True:
        yield from rng.sample(kinds, len(kinds))


async def attack(scene: Scene, kinds: Iterator[Kind]) -> None:
    """Make one attack after the other until cancelled."""
    for kind in kinds:
        name = kind.name

        def note(peer_id: str, kind: Kind = kind) -> None:
            report(member=peer_id, kind=kind.name, malicious=kind.is_malicious)

        try:
            async with asyncio.timeout(kind.limit_s):
                report(kind=name, actions=await kind.act(replace(scene, on_member=note)))
        except Exception as error:  # of the node or of this machine
            report(kind=name, error=f"{type(error).__name__}: {error}"[:300])


async def main(config: dict[str, Any]) -> None:
    """Attack until the standard input ends."""
    reader, rng = asyncio.StreamReader(), random.Random(config["seed"])
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    node = RunningNode(OtherProcess(config["pid"]), Path(config["home"]), Path(config["log"]))  # type: ignore[arg-type]
    maker = GroupMaker(Path(config["model"]), load_manifest(config["manifest"]))
    kinds = [kind for kind in all_kinds() if not any(word in kind.name for word in config["without"])]
    in_rounds, workers = rounds(kinds, rng), list[asyncio.Task[None]]()
    with tempfile.TemporaryDirectory(prefix="fta") as sockets:
        scene = Scene(Victim(node), maker, Path(sockets), rng)
        report(kinds=[kind.name for kind in kinds])
        while order := (await reader.readline()).strip():
            if order == b"on":
                workers = [asyncio.create_task(attack(scene, in_rounds)) for _ in range(NUM_AT_ONCE)]
                continue
            await stop(workers)
            report(quiet=True)
        await stop(workers)


async def stop(workers: list[asyncio.Task[None]]) -> None:
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
