"""Throughput and latency of the path announce -> fetch -> stored between real nodes, against bare calls between p2pds.

    python bench/gossip.py                 8 nodes: bytes, throughput, latency
    python bench/gossip.py --short         2 nodes, groups of 24 tokens: bytes, latency
    python bench/gossip.py --nodes 32      does every group arrive although one node in eight is killed and restarted?

Each node has a p2pd, validation, and a buffer on disk with its synchronization, and pulls everything from everyone.
There is no model, and rewards cost nothing. The nodes are spread over one process a core. Groups have 12 x 674 tokens,
envelopes 64 KiB. Rounds of groups and of bare calls alternate, so that both run under the same load of the machine.

Bytes are counted at the loopback interface. If other programs use it, run this in a network namespace (`unshare -rn sh
-c 'ip link set lo up; exec python bench/gossip.py'`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nodes.hosts import MEASURED_NODES, NUM_TARGET_MEMBERS, NUM_TOKENS, Host, call_all, log_line, merged
from stubs.wire_groups import NUM_COMPLETIONS, loopback_bytes

STARTED_AT_ONCE = 4  # in each process
SETTLE_S = 3.0  # heartbeats of gossipsub: before its mesh is built, announcements are lost
MEETING_S = 120.0
ROUND_S = 60.0
SHORT_TOKENS = 2  # of each completion
SHORT_PER_S = 12.0  # groups a node makes, as in the demo
PERIOD_S = 1.0  # each node publishes once in this time in the test without load
SURVIVAL_PERIOD_S = 2.0
KILLED_FRACTION = 1 / 8
NUM_GIVEN_PEERS = 3  # known to all nodes and not killed
POLL_INTERVAL_S = 1.0


@asynccontextmanager
async def swarm(
    folder: Path, num_nodes: int, num_processes: int, *, num_tokens: int = NUM_TOKENS
) -> AsyncIterator[tuple[list[Host], tuple[str, ...]]]:
    """Yield nodes that know each other as members, spread over processes, and the addresses of the first ones."""
    folders = [folder / str(at) for at in range(num_nodes)]
    parts = [folders[at::num_processes] for at in range(num_processes)]
    hosts = [Host(part, num_nodes=num_nodes, num_tokens=num_tokens) for part in parts]
    try:
        given = tuple(await hosts[0].call("start", (), 0, 1))
        for first in range(1, hosts[0].num_nodes + 1, STARTED_AT_ONCE):
            starts = [(host, first if host is hosts[0] else first - 1) for host in hosts]
            found = await asyncio.gather(*(host.call("start", given[:1], at, STARTED_AT_ONCE) for host, at in starts))
            given += tuple(found[0])
        await _meet(hosts, min(NUM_TARGET_MEMBERS, num_nodes - 1))
        await asyncio.sleep(SETTLE_S)
        yield hosts, given[:NUM_GIVEN_PEERS]
    finally:
        await asyncio.gather(*(host.end() for host in hosts))


async def _meet(hosts: list[Host], num_required: int) -> None:
    deadline = time.monotonic() + MEETING_S
    while True:
        counts = [count for part in await call_all(hosts, "num_members") for count in part]
        if min(counts) >= num_required or time.monotonic() > deadline:
            log_line(f"{len(counts)} nodes are up and know {min(counts)} to {max(counts)} members")
            return
        await asyncio.sleep(POLL_INTERVAL_S)


def percentiles_ms(name: str, seconds: list[float]) -> dict[str, float]:
    return {f"{name}p{rank}_ms": round(1e3 * float(np.percentile(seconds, rank)), 1) for rank in (50, 99)}


async def measure_unloaded(hosts: list[Host], seconds: float) -> dict[str, Any]:
    """Return latencies from the call of the publish loop, from its write to the buffer, and of bare calls."""
    await call_all(hosts, "publish_evenly", seconds, PERIOD_S)
    await asyncio.sleep(POLL_INTERVAL_S)
    size = await hosts[0].call("envelope_bytes")
    await call_all(hosts, "hold_bare", int(seconds / PERIOD_S) + 1, size)
    await call_all(hosts, "announce_bare_evenly", seconds, PERIOD_S)
    await asyncio.sleep(POLL_INTERVAL_S)
    bare = [latency for part in await call_all(hosts, "bare_latencies_s") for latency in part]
    ours, from_own_disk = await latencies_s(hosts)
    figures = percentiles_ms("", ours) | percentiles_ms("from_own_disk_", from_own_disk) | percentiles_ms("bare_", bare)
    return {
        "envelope_bytes": size,
        "p99_ratio_to_bare": round(figures["p99_ms"] / figures["bare_p99_ms"], 2),
        **figures,
    }


async def timed(hosts: list[Host], name: str, *arguments: Any) -> tuple[float, np.ndarray, list[Any]]:
    """Return wall seconds, processor seconds of the nodes' processes and of the p2pds, and the results of the calls."""
    cpu_before = np.sum(await call_all(hosts, "cpu_s"), axis=0)
    started = time.monotonic()
    results = await call_all(hosts, name, *arguments)
    took_s = time.monotonic() - started
    return took_s, np.sum(await call_all(hosts, "cpu_s"), axis=0) - cpu_before, results


async def measure_loaded(
    hosts: list[Host], *, num_nodes: int, groups_per_node: int, num_rounds: int, size: int
) -> dict[str, Any]:
    """Return throughput and bytes of alternating rounds of groups and of bare calls."""
    our_s = bare_s = crossed = 0.0
    our_cpu, bare_cpu = np.zeros(2), np.zeros(2)
    tokens_before = await foreign_tokens(hosts)
    for number in range(1, num_rounds + 1):
        bytes_before = loopback_bytes()
        took_s, cpu, done = await timed(hosts, "our_round", groups_per_node, ROUND_S)
        crossed += loopback_bytes() - bytes_before
        await call_all(hosts, "hold_bare", groups_per_node, size)
        bare_took_s, bare_cpu_s, _ = await timed(hosts, "bare_round")
        our_s, bare_s, our_cpu, bare_cpu = our_s + took_s, bare_s + bare_took_s, our_cpu + cpu, bare_cpu + bare_cpu_s
        log_line(f"round {number}: ours {took_s:.2f} s, bare {bare_took_s:.2f} s; all arrived: {all(done)}")
    num_bodies = num_rounds * groups_per_node * num_nodes * (num_nodes - 1)
    return {
        "throughput_ratio_to_bare": round(bare_s / our_s, 3),
        "mb_per_s": round(num_bodies * size / our_s / 1e6, 1),
        "bare_mb_per_s": round(num_bodies * size / bare_s / 1e6, 1),
        "interface_bytes_per_token_per_receiver": round(crossed / (await foreign_tokens(hosts) - tokens_before), 3),
        **cpu_ms("", our_cpu / num_bodies),
        **cpu_ms("bare_", bare_cpu / num_bodies),
    }


def cpu_ms(name: str, cpu_s: np.ndarray) -> dict[str, float]:
    return {
        f"{name}{what}_cpu_ms_per_body": round(1e3 * value, 3)
        for what, value in zip(("node", "p2pd"), cpu_s, strict=True)
    }


async def foreign_tokens(hosts: list[Host]) -> int:
    stored = [item for part in await call_all(hosts, "stored") for item in part]
    return sum(item.num_tokens for item in stored if item.sender != item.peer_id)


async def delivered_fraction(hosts: list[Host], num_nodes: int, num_groups: int) -> float:
    """Return the number of groups stored by other nodes, divided by the expected number."""
    stored = [item for part in await call_all(hosts, "stored") for item in part]
    return sum(item.sender != item.peer_id for item in stored) / (num_groups * (num_nodes - 1))


async def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return bytes, throughput and latency of groups and of bare calls."""
    num_nodes = arguments.nodes
    async with swarm(folder, num_nodes, arguments.processes) as (hosts, _):
        peer_ids = [peer_id for part in await call_all(hosts, "peer_ids") for peer_id in part]
        await call_all(hosts, "start_bare", peer_ids)
        await asyncio.sleep(SETTLE_S)
        result = await measure_unloaded(hosts, arguments.unloaded_s)
        loaded = await measure_loaded(
            hosts,
            num_nodes=num_nodes,
            groups_per_node=arguments.groups or 40,
            num_rounds=arguments.rounds,
            size=result["envelope_bytes"],
        )
        num_groups = sum(len(times) for part in await call_all(hosts, "published_at") for times in part.values())
        fraction = await delivered_fraction(hosts, num_nodes, num_groups)
        if arguments.verbose:
            log_line(str(await call_all(hosts, "counters")))
    return result | loaded | {"delivered_fraction": round(fraction, 6)}


async def measure_short(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return bytes and latency of groups with a few tokens, which each node publishes evenly, as in the demo."""
    async with swarm(folder, arguments.nodes, arguments.processes, num_tokens=SHORT_TOKENS) as (hosts, _):
        await call_all(hosts, "publish_evenly", POLL_INTERVAL_S, 1 / arguments.per_s)  # until all nodes are connected
        await asyncio.sleep(SETTLE_S)
        tokens_before, sent_before = await foreign_tokens(hosts), sum(await call_all(hosts, "num_announcements_sent"))
        at, bytes_before = time.monotonic(), loopback_bytes()
        await call_all(hosts, "publish_evenly", arguments.unloaded_s, 1 / arguments.per_s)
        await asyncio.sleep(SETTLE_S)
        crossed, took_s = loopback_bytes() - bytes_before, time.monotonic() - at
        tokens = await foreign_tokens(hosts) - tokens_before
        num_sent = sum(await call_all(hosts, "num_announcements_sent")) - sent_before
        bytes_before = loopback_bytes()
        await asyncio.sleep(took_s)
        idle = loopback_bytes() - bytes_before
        latencies, _ = await latencies_s(hosts)
        num_groups = sum(len(times) for part in await call_all(hosts, "published_at") for times in part.values())
        fraction = await delivered_fraction(hosts, arguments.nodes, num_groups)
    return {
        "tokens_per_group": SHORT_TOKENS * NUM_COMPLETIONS,
        "groups_per_s_per_node": arguments.per_s,
        "short_interface_bytes_per_token_per_receiver": round(crossed / tokens, 1),
        "idle_bytes_per_s": round(idle / took_s),
        "groups_per_announcement": round(tokens / (arguments.nodes - 1) / SHORT_TOKENS / NUM_COMPLETIONS / num_sent, 2),
        **percentiles_ms("", latencies),
        "delivered_fraction": round(fraction, 6),
    }


async def latencies_s(hosts: list[Host]) -> tuple[list[float], list[float]]:
    """Return the seconds until each other node stored a group, from the call of the publish loop and from its
    storing there.
    """
    published = {
        peer_id: iter(times) for part in await call_all(hosts, "published_at") for peer_id, times in part.items()
    }
    ours, from_own_disk = [], []
    for items in merged(await call_all(hosts, "stored")).values():
        (own,) = [item for item in items if item.sender == item.peer_id]
        published_at = next(published[own.sender])
        foreign = [item.at for item in items if item is not own]
        ours += [at - published_at for at in foreign]
        from_own_disk += [at - own.at for at in foreign]
    return ours, from_own_disk


async def survive(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return whether every group reaches every node although one in eight is killed and restarted.

    Of those, every other one loses its p2pd alone, the rest their whole life: the home stays.
    """
    num_nodes, groups_per_node = arguments.nodes, arguments.groups or 4
    async with swarm(folder, num_nodes, arguments.processes) as (hosts, given):
        started = time.monotonic()
        await call_all(hosts, "begin_publishing", groups_per_node, SURVIVAL_PERIOD_S)
        places = [(host, at) for host in hosts for at in range(host.num_nodes)][NUM_GIVEN_PEERS:]
        victims = random.Random(0).sample(places, max(1, round(num_nodes * KILLED_FRACTION)))
        for number, (host, at) in enumerate(victims):
            await asyncio.sleep(POLL_INTERVAL_S)
            peer_id = await host.call("kill", at, given, number % 2 == 0)
            log_line(f"{peer_id[-6:]} was killed{' and is back' if number % 2 == 0 else ': its p2pd'}")
        await call_all(hosts, "end_publishing")
        num_groups = num_nodes * groups_per_node
        deadline = time.monotonic() + arguments.within_s
        while (fraction := await delivered_fraction(hosts, num_nodes, num_groups)) < 1 and time.monotonic() < deadline:
            log_line(f"delivered: {fraction:.4f}")
            await asyncio.sleep(POLL_INTERVAL_S)
        took_s = time.monotonic() - started
        if arguments.verbose:
            log_line(str(await call_all(hosts, "counters")))
    return {"killed": len(victims), "delivered_fraction": round(fraction, 6), "took_s": round(took_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, help="8, with --short 2; above 8: survival instead of speed")
    parser.add_argument("--short", action="store_true", help="bytes of groups with a few tokens")
    parser.add_argument("--per-s", type=float, default=SHORT_PER_S, help="with --short: groups of each node a second")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--groups", type=int, help="groups of each node in a round (40), or in all (4)")
    parser.add_argument("--rounds", type=int, default=3, help="of groups and of bare calls, alternating")
    parser.add_argument("--unloaded-s", type=float, default=20.0)
    parser.add_argument("--within-s", type=float, default=120.0, help="survival: patience after the last group")
    parser.add_argument("--verbose", action="store_true", help="the nodes' counters on stderr")
    arguments = parser.parse_args()
    arguments.nodes = arguments.nodes or (2 if arguments.short else MEASURED_NODES)
    work = measure_short if arguments.short else survive if arguments.nodes > MEASURED_NODES else measure
    with tempfile.TemporaryDirectory(prefix="gb-") as folder:
        result = asyncio.run(work(Path(folder), arguments))
    sys.stdout.write(json.dumps({"bench": "gossip", "nodes": arguments.nodes, **result}) + "\n")


if __name__ == "__main__":
    main()
