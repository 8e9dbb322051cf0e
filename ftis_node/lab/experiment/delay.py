"""Delay of new weights in an experiment, in virtual time: optimizer steps instead of seconds.

`swarm/transit.py` has the rule and `config/delay.py` the delays; nodes of a real swarm use the same in seconds. Here a
delay may apply to the last node only: `fixed:8@peer`. Then its peers, whose own groups are fresh, receive stale ones.
"""

from __future__ import annotations

from ftis_node.config.delay import Delay, parse_delay
from ftis_node.errors import UsageError

__all__ = ["NO_DELAY", "Delay", "delay_alone", "parse_delay", "parse_delays"]

NONE = "none"
NO_DELAY = Delay(0, 0)
OF_PEER = "@peer"


def parse_delays(spec: str) -> tuple[Delay, Delay | None]:
    """Return the delay of all nodes, and the last node's if it differs, for `DELAY` or `DELAY@peer`. Raises
    UsageError.
    """
    try:
        delay = parse_delay(spec.removesuffix(OF_PEER))
    except UsageError as error:
        raise UsageError(f"{error}; DELAY{OF_PEER}: of the last node alone") from None
    if not spec.endswith(OF_PEER):
        return delay, None
    if delay == NO_DELAY:
        raise UsageError(f"{spec!r}: a late peer needs a delay above 0")
    return NO_DELAY, delay


def delay_alone(spec: str) -> str:
    """Return the delay of the baseline for a swarm under `spec`. Raises UsageError."""
    _, of_last = parse_delays(spec)
    return spec if of_last is None else NONE
