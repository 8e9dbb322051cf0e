"""The cost of a node besides generation and training: bandwidth, disk, and the daemon's share of a core.

    python bench/node_cost.py                        3 nodes, 12 groups a minute received by each, 3 lengths; 4 minutes
    python bench/node_cost.py --tokens 300 --seconds 30

Each node has a process, a p2pd, validation, and a buffer on disk with its synchronization. There is no model, and
rewards cost nothing. Every node publishes a group of 12 completions each 10 seconds and pulls those of both others.
An idle swarm, without any group, is measured first. An hour and a day are extrapolated from `--seconds`.

Bytes are counted at the loopback interface, so other programs must not use it: run this in a network namespace
(`unshare -rn sh -c 'ip link set lo up; exec python bench/node_cost.py'`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from gossip import swarm
from nodes.hosts import Host, call_all, log_line
from stubs.wire_groups import NUM_COMPLETIONS, loopback_bytes

NUM_NODES = 3
PERIOD_S = 10.0  # of a node's own groups: the two others give 12 a minute
HOUR_S, DAY_S = 3600.0, 86400.0
LENGTHS = (30, 300, 700)


async def cost(hosts: list[Host], seconds: float, *, publishes: bool) -> dict[str, float]:
    """Return what one node costs on average over `seconds`."""
    cpu, written = await totals(hosts)
    stored = await num_stored(hosts)
    crossed, began = loopback_bytes(), time.monotonic()
    if publishes:
        await call_all(hosts, "publish_evenly", seconds, PERIOD_S)
    else:
        await asyncio.sleep(seconds)
    took_s = time.monotonic() - began
    cpu_after, written_after = await totals(hosts)
    daemon, p2pd = (cpu_after - cpu) / NUM_NODES / took_s
    per_node = (loopback_bytes() - crossed) / NUM_NODES / took_s
    received = (await num_stored(hosts) - stored) * (NUM_NODES - 1) / NUM_NODES / NUM_NODES
    return {
        "received_groups_per_minute": round(received / took_s * 60, 1),
        "daemon_core_percent": round(100 * float(daemon), 2),
        "p2pd_core_percent": round(100 * float(p2pd), 2),
        "sent_mb_per_hour": round(per_node * HOUR_S / 1e6, 2),
        "received_mb_per_hour": round(per_node * HOUR_S / 1e6, 2),
        "written_gb_per_day": round((written_after - written) / NUM_NODES / took_s * DAY_S / 1e9, 2),
    }


async def num_stored(hosts: list[Host]) -> int:
    """Return the number of groups in all buffers: each group once for each node."""
    return sum(len(part) for part in await call_all(hosts, "stored"))


async def totals(hosts: list[Host]) -> tuple[np.ndarray, int]:
    """Return the processor seconds (daemons, p2pds) and the bytes written to disk, of all nodes so far."""
    return np.sum(await call_all(hosts, "cpu_s"), axis=0), sum(await call_all(hosts, "written_bytes"))


async def measure(folder: Path, num_tokens: int, seconds: float, *, with_idle: bool) -> dict[str, dict[str, float]]:
    """Return the cost of a node by what it does: idle, or exchanging groups of 12 x `num_tokens`."""
    async with swarm(folder, NUM_NODES, NUM_NODES, num_tokens=num_tokens) as (hosts, _):
        found = {"idle": await cost(hosts, seconds, publishes=False)} if with_idle else {}
        return found | {str(num_tokens): await cost(hosts, seconds, publishes=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS), help="tokens of a completion")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each figure")
    arguments = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    for num_tokens in arguments.tokens:
        with tempfile.TemporaryDirectory(prefix="nc-") as folder:
            work = measure(Path(folder), num_tokens, arguments.seconds, with_idle="idle" not in figures)
            figures |= asyncio.run(work)
        log_line(f"{num_tokens} tokens: {figures[str(num_tokens)]}")
    result = {"bench": "node_cost", "completions_per_group": NUM_COMPLETIONS, "by_tokens": figures}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
