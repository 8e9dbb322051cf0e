"""Simulation of a swarm of 10 to 10,000 nodes in virtual time, with the policies of real nodes.

settings.py      all assumptions, in one place        host_link.py     bandwidth, latency, bytes by kind
announcement.py  an announced group                   member_views.py  a shard's members in the directory
events.py        the queue of events                  world.py         the swarm, and what all participants have
peer_table.py    what a node knows of its peers       transfers.py     pulls, queries, confirmations
shard_reader.py  the shards that a node reads         node.py          an honest node
observed.py      a node whose policy code is timed    attackers.py     what attackers do
population.py    who takes part, churn                sizes.py         bytes of the policies' entries
result.py        one run, and what is reported
"""

from __future__ import annotations

from swarm_simulation.result import SimulationResult, simulate
from swarm_simulation.settings import SimulationSettings

__all__ = ["SimulationResult", "SimulationSettings", "simulate"]
