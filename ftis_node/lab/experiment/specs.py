"""Specs of an experiment: the delay of new weights, and the baseline of a node without peers.

A delay counts in optimizer steps; `config/roles.py` has its forms. It may apply to the last node only: `fixed:8@peer`.
Then its peers, whose own groups are fresh, receive stale ones.

The baseline is a method, by default `grpo`:

    alone[:own][:updates=K][:METHOD[:parameter=value...]]
"""

from __future__ import annotations

from dataclasses import dataclass

from ftis_node.config.roles import Delay, parse_delay
from ftis_node.errors import UsageError

NONE = "none"
NO_DELAY = Delay(0, 0)
OF_PEER = "@peer"
ALONE = "alone"
OWN = "own"
UPDATES = "updates"
DEFAULT_METHOD = "grpo"
MAX_UPDATES = 64  # same limit as in the manifest
CONTROLS = ("alone:own", *(f"alone:own:{UPDATES}={number}" for number in (1, 2, 4)))  # a repeated number is dropped


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


@dataclass(frozen=True, slots=True)
class BaselineSpec:
    """Parsed baseline. `updates` None: as in the run's manifest."""

    own: bool
    updates: int | None
    method: str


def is_alone(method: str) -> bool:
    return method.partition(":")[0] == ALONE


def parse_alone(text: str) -> BaselineSpec:
    rest = text.split(":")[1:]
    own = rest[:1] == [OWN]
    rest = rest[own:]
    updates: int | None = None
    if rest and rest[0].startswith(f"{UPDATES}="):
        number = rest.pop(0).partition("=")[2]
        if not number.isdecimal() or not 1 <= int(number) <= MAX_UPDATES:
            raise UsageError(f"{text!r}: updates is a number from 1 to {MAX_UPDATES}")
        updates = int(number)
    return BaselineSpec(own, updates, ":".join(rest) or DEFAULT_METHOD)
