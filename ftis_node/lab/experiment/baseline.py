"""Baseline of an experiment: a node without peers, written `alone` among the methods.

    alone[:own][:updates=K][:METHOD[:parameter=value...]]

    alone                   generates a whole update itself
    alone:own               generates as much as a node of the swarm, and trains on that
    alone:own:updates=4     the same with four optimizer steps on each batch: as much learner compute as a node of four
                            has, which also trains on the groups of its peers
    alone:gepo:clip=false   generates a whole update itself, with another method

On own completions of the newest policy all clipped and truncated methods are equal. With several updates on a batch, or
delayed weights, they are not. METHOD defaults to `grpo`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftis_node.errors import UsageError

ALONE = "alone"
OWN = "own"
UPDATES = "updates"
DEFAULT_METHOD = "grpo"
MAX_UPDATES = 64  # same limit as in the manifest
CONTROLS = (
    "alone:own",
    *(f"alone:own:{UPDATES}={number}" for number in (1, 2, 4)),
)  # drops a repeated number of updates


@dataclass(frozen=True, slots=True)
class BaselineSpec:
    """Parsed baseline. `updates` None: as in the run's manifest."""

    own: bool
    updates: int | None
    method: str


def is_alone(method: str) -> bool:
    """Return whether a method of an experiment is a node without peers."""
    return method.partition(":")[0] == ALONE


def parse_alone(text: str) -> BaselineSpec:
    """Parse `text`. Raises UsageError."""
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
