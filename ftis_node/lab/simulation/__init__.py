"""A swarm of 10 to 10,000 nodes in virtual time, driven by the very policies of `ftis_node/swarm` that nodes run.

events.py      what happens next                    settings.py   every assumption, in one place
group.py        an announced group                   views_of_shard.py     who is in a shard, and who is known to be
link.py        bandwidth and latency of a host      traffic.py    bytes by kind
peer.py        what every participant has           node.py       an honest node
attackers.py   what the others do                   transfers.py  pulls, questions, confirmations
world.py       all of them, and who comes and goes  figures.py    what is reported
"""

from __future__ import annotations

from ftis_node.lab.simulation.result import SimulationResult
from ftis_node.lab.simulation.run import simulate
from ftis_node.lab.simulation.settings import SimulationSettings

__all__ = ["SimulationResult", "SimulationSettings", "simulate"]
