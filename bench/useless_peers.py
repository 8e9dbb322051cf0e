"""Steps per second of a node beside peers whose groups it cannot use, and beside peers whose groups it can.

    python bench/useless_peers.py --model DIR [--seconds 120]        DIR: a folder of `ftis-node tiny`

Four real nodes (`ftis-node join`) with the same run work at the same time, so that other load slows each of them:

    alone     no peer
    useless   one peer with another tokenizer, one whose groups are all refused (it is soon banned), one that is silent
    slow      two peers with a valid group per `SLOW` periods, one whose rewards are all equal
    useful    three peers with valid groups

The peers are members of the run over p2pd on the loopback interface, without a model. Each but the silent one announces
a group per `--period` seconds. The patience of the run (`step.foreign_wait_s`) is 10 s, a hundred times a step alone.
The measurement begins when each node has made a step after its first patience. It takes `--seconds`.

The ratios are steps per second alone over those beside the peers. Foreign groups make a step
larger, so `useful_ratio` is above 1 without any wait. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ftis_node.config.home import Home
from ftis_node.config.manifest import parse_manifest
from ftis_node.errors import FtisError
from ftis_node.gossip import NetworkSettings
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.lab.child_processes import ChildProcess, ChildProcesses, children
from ftis_node.node.http_api.node_client import read_status
from ftis_node.records.envelope import PeerRecord, announce_group, seal_group, seal_peer_record
from ftis_node.records.identity import Identity
from ftis_node.swarm.topology import shard_of
from ftis_node.telemetry.events import read_events
from stubs.group_maker import GroupMaker

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PATIENCE_S = 10.0
START_LIMIT_S = 400.0
POLL_S = 0.5
OTHER_TOKENIZER = "ab" * 16
RUN = f"""
name = "useless-peers"
task = "arithmetic"
[sampling]
group_size = 8
max_prompt_tokens = 64
max_completion_tokens = 24
max_total_tokens = 96
[step]
own_groups = 4
foreign_groups = 3
foreign_wait_s = {PATIENCE_S}
[optimizer]
learning_rate = 1e-5
[eval]
every_steps = 0
"""
SLOW = 15  # times the period of the others
CASES = {
    "alone": (),
    "useless": ("other_tokenizer", "refused", "silent"),
    "slow": ("slow", "slow", "no_signal"),
    "useful": ("useful",) * 3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model of `ftis-node tiny`")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the measurement")
    parser.add_argument("--period", type=float, default=1.0, help="seconds between two groups of a peer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="useless-peers-") as scratch:
        figures = asyncio.run(measure(Path(scratch), options))
    for name, value in figures.items():
        sys.stdout.write(f"{name:28} {value}\n")
    sys.stdout.write(json.dumps({"cores": os.cpu_count(), "seconds": options.seconds} | figures) + "\n")


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Run all cases at the same time. Return their figures by name."""
    (folder / "run.toml").write_text(RUN)
    homes = {name: Home(folder / name) for name in CASES}
    async with AsyncExitStack() as stack:
        started = stack.enter_context(children(folder / "logs"))
        nodes = {name: start(started, home, options.model, folder / "run.toml") for name, home in homes.items()}
        maker = GroupMaker(options.model, parse_manifest(RUN, source="bench"))
        peers = await stack.enter_async_context(asyncio.TaskGroup())
        running = []
        for name, kinds in CASES.items():
            address = await address_of(nodes[name], homes[name])
            for number, kind in enumerate(kinds):
                peer = Peer(kind, maker, folder / "peers" / f"{name}-{number}", address, options.period)
                running.append(peers.create_task(peer.run(), name=f"{name}-{kind}"))
        await asyncio.sleep(PATIENCE_S)
        for name, home in homes.items():
            await until_step(nodes[name], home)
        began_at = time.time()
        await asyncio.sleep(options.seconds)
        ended_at = time.time()
        for task in running:
            task.cancel()
        return figures_of({name: steps_of(home, began_at, ended_at) for name, home in homes.items()}, options.seconds)


def figures_of(steps: dict[str, list[dict[str, float]]], seconds: float) -> dict[str, float]:
    rates = {name: len(done) / seconds for name, done in steps.items()}
    foreign = {name: sum(step["foreign_groups"] for step in done) / max(1, len(done)) for name, done in steps.items()}
    return {
        **{f"{name}_steps_per_s": round(rate, 3) for name, rate in rates.items()},
        **{f"{name}_foreign_per_step": round(count, 2) for name, count in foreign.items() if name != "alone"},
        **{
            f"{name}_ratio": round(rates["alone"] / max(rate, 1e-9), 3)
            for name, rate in rates.items()
            if name != "alone"
        },
    }


def start(started: ChildProcesses, home: Home, model: Path, run: Path) -> ChildProcess:
    return started.start(
        home.root.name, "join", "--model", str(model), "--run", str(run), "--engine", "torch", "--listen", LOOPBACK,
        "--home", str(home.root),
    )  # fmt: skip


async def address_of(node: ChildProcess, home: Home) -> str:
    """Return an address of a node as soon as it runs. Raises FtisError if it ends or does not start in time."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if node.exit_code is not None:
            raise FtisError(f"{node.name} ended with exit code {node.exit_code}: {node.last_words()}")
        if home.running_url() and (addresses := read_status(home).node.addresses):
            return next(address for address in addresses if address.startswith("/ip4/127.0.0.1/"))
        await asyncio.sleep(POLL_S)
    raise FtisError(f"{node.name} was not up within {START_LIMIT_S:.0f} s: {node.last_words()}")


async def until_step(node: ChildProcess, home: Home) -> None:
    """Wait for a step of the node that ends from now on."""
    began_at, deadline = time.time(), time.monotonic() + START_LIMIT_S
    while not steps_of(home, began_at, time.time()):
        if node.exit_code is not None or time.monotonic() > deadline:
            raise FtisError(f"{node.name} makes no step: {node.last_words()}")
        await asyncio.sleep(POLL_S)


def steps_of(home: Home, began_at: float, ended_at: float) -> list[dict[str, float]]:
    return [step for step in read_events(home.events, name="step") if began_at <= step["time"] < ended_at]


@dataclass
class Peer:
    """A member of the run without a model. Its kind is a name of `CASES`."""

    kind: str
    maker: GroupMaker
    folder: Path
    address: str
    period_s: float

    async def run(self) -> None:
        """Join the node at `address`, then announce a group per period until canceled."""
        identity, run_id = Identity.generate(), self.maker.manifest.run_id
        network = NetworkSettings(
            sockets_dir=self.folder, listen=(LOOPBACK,), peers=(self.address,), use_nat_helpers=False
        )
        gossip = Libp2pGossip(
            network, identity=identity, run_id=run_id, num_shards=self.maker.manifest.wire.announcement_shards
        )
        bodies: dict[bytes, bytes] = {}

        async def lookup(ids: Sequence[bytes]) -> list[bytes]:
            return [bodies[group_id] for group_id in ids if group_id in bodies]

        gossip.serve(lookup)
        await gossip.start()
        try:
            await gossip.publish_record(seal_peer_record(self._record(identity), identity), ttl_s=600)
            number = 0
            while True:
                await asyncio.sleep(self.period_s * (SLOW if self.kind == "slow" else 1))
                if self.kind == "silent":
                    continue
                number += 1
                group = await asyncio.to_thread(self.maker.group, identity, number, is_solved=self.kind != "no_signal")
                if self.kind == "other_tokenizer":
                    group = replace(group, tokenizer=OTHER_TOKENIZER)
                if self.kind == "refused":
                    group = replace(group, problem_hash=bytes(16))
                envelope = seal_group(group, identity)
                bodies[envelope.id] = data = envelope.to_bytes()
                announcement = announce_group(envelope, group, envelope_bytes=len(data))
                shard = shard_of(identity.peer_id, self.maker.manifest.wire.announcement_shards)
                await gossip.announce(announcement.to_bytes(), shard=shard)
        finally:
            await gossip.close()

    def _record(self, identity: Identity) -> PeerRecord:
        fingerprint = OTHER_TOKENIZER if self.kind == "other_tokenizer" else self.maker.tokenizer.fingerprint
        return PeerRecord(
            run_id=self.maker.manifest.run_id, peer_id=identity.peer_id, name=self.kind, model="none", parameters=0,
            tokenizer=fingerprint, role="full", last_number=0, policy_version=0, tokens_per_s=0.0,
            created_at=time.time(), software="bench",
        )  # fmt: skip


if __name__ == "__main__":
    main()
