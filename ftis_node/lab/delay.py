"""How late new weights reach the generators of an experiment, in virtual time: optimiser steps, not seconds.

`swarm/transit.py` has the rule and `config/delay.py` the delays; the nodes of a real swarm use the same in seconds.
"""

from __future__ import annotations

from ftis_node.config.delay import Delay, parse_delay
from ftis_node.swarm.transit import InTransit

__all__ = ["NO_DELAY", "Delay", "InTransit", "parse_delay"]

NO_DELAY = Delay(0, 0)
