"""Simulation of a swarm of 10 to 10,000 nodes in virtual time, with the policies of real nodes.

events.py        event queue                          settings.py      all assumptions, in one place
announcement.py  an announced group                   member_views.py  members of a shard, and who knows them
host_link.py     bandwidth and latency of a host      traffic.py       bytes by kind
peer.py          what every participant has           node.py          an honest node
attackers.py     what attackers do                    transfers.py     pulls, queries, confirmations
environment.py   what participants see of the world   world.py         all of them, and churn
run.py           one run from start to result         result.py        what is reported
"""

from __future__ import annotations

from swarm_simulation.result import SimulationResult
from swarm_simulation.run import simulate
from swarm_simulation.settings import SimulationSettings

__all__ = ["SimulationResult", "SimulationSettings", "simulate"]
