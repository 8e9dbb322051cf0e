"""A separate process for all attackers, so that they take no time of the honest senders' event loop.

    python -m tests.attacks.endurance.attackers CONFIG   # JSON: pid, home, log, model, manifest, seed, without, skip

It attacks until its standard input ends. It prints lines of JSON:

    {"kinds": names}                       the attacks begin
    {"member": id, "kind", "malicious"}    an attacking member
    {"kind", "actions"}                    an attack that ended
    {"kind", "error"}                      an attack that failed
"""

import asyncio
import itertools
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


class OtherProcess(psutil.Process):
    """A process of another parent, with the interface of `Popen`."""

    def poll(self) -> int | None:
        return None if self.is_running() and self.status() != psutil.STATUS_ZOMBIE else -1


def report(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def rounds(kinds: list[Kind], rng: random.Random) -> Iterator[Kind]:
    while True:
        yield from rng.sample(kinds, len(kinds))


async def attack(scene: Scene, kinds: Iterator[Kind]) -> None:
    for kind in kinds:

        def note(peer_id: str, kind: Kind = kind) -> None:
            report(member=peer_id, kind=kind.name, malicious=kind.is_malicious)

        try:
            async with asyncio.timeout(kind.limit_s):
                report(kind=kind.name, actions=await kind.act(replace(scene, on_member=note)))
        except Exception as error:  # of the node or of this machine
            report(kind=kind.name, error=f"{type(error).__name__}: {error}"[:300])


async def main(config: dict[str, Any]) -> None:
    """Attack until the standard input ends. `skip` attacks of the seed's order were made before."""
    reader, rng = asyncio.StreamReader(), random.Random(config["seed"])
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    process: Any = OtherProcess(config["pid"])
    node = RunningNode(process, Path(config["home"]), Path(config["log"]))
    maker = GroupMaker(Path(config["model"]), load_manifest(config["manifest"]))
    kinds = [kind for kind in all_kinds() if not any(word in kind.name for word in config["without"])]
    in_rounds = itertools.islice(rounds(kinds, rng), config["skip"], None)
    with tempfile.TemporaryDirectory(prefix="fta") as sockets:
        scene = Scene(Victim(node), maker, Path(sockets), rng)
        report(kinds=[kind.name for kind in kinds])
        workers = [asyncio.create_task(attack(scene, in_rounds)) for _ in range(NUM_AT_ONCE)]
        await reader.read()
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
