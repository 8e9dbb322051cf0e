"""Simulation of a swarm of 10 to 10,000 nodes in virtual time, with the policies of real nodes.

settings.py      all assumptions, in one place        announcement.py  an announced group
host_link.py     bandwidth, latency, bytes by kind    peer.py          what every participant has
node.py          an honest node                       shard_reader.py  the shards that it reads
observed.py      a node whose policy code is timed    attackers.py     what attackers do
transfers.py     pulls, queries, confirmations        world.py         events, members, churn
result.py        one run, and what is reported        sizes.py         bytes of the policies' entries
"""

from __future__ import annotations

from swarm_simulation.result import SimulationResult, simulate
from swarm_simulation.settings import SimulationSettings

__all__ = ["SimulationResult", "SimulationSettings", "simulate"]
