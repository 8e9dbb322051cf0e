"""A node without peers, as an experiment's methods name it: what a swarm is compared with.

    alone[:own][:updates=K][:METHOD[:parameter=value...]]

    alone                   generates a whole update itself
    alone:own               generates what a node of the swarm generates itself, and trains on that
    alone:own:updates=4     likewise, and makes four optimiser steps of each batch: as much learner compute as a node of
                            four has, which also trains on what its peers generated
    alone:gepo:clip=false   generates a whole update itself, under another method

On own completions of the newest policy all clipped and truncated methods are the same; with several updates a batch, or
late weights, they are not. METHOD is `grpo` where none is given.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftis_node.errors import UsageError

ALONE = "alone"
OWN = "own"
UPDATES = "updates"
DEFAULT_METHOD = "grpo"
MAX_UPDATES = 64  # as in the manifest
CONTROLS = ("alone:own", *(f"alone:own:{UPDATES}={number}" for number in (1, 2, 4)))  # the run's own number is left out


@dataclass(frozen=True, slots=True)
class Alone:
    """`updates` None: as the run says."""

    own: bool
    updates: int | None
    method: str


def is_alone(method: str) -> bool:
    """Whether a method of an experiment is a node without peers."""
    return method.partition(":")[0] == ALONE


def parse_alone(text: str) -> Alone:
    """What `text` says. Raises UsageError."""
    rest = text.split(":")[1:]
    own = rest[:1] == [OWN]
    rest = rest[own:]
    updates: int | None = None
    if rest and rest[0].startswith(f"{UPDATES}="):
        number = rest.pop(0).partition("=")[2]
        if not number.isdecimal() or not 1 <= int(number) <= MAX_UPDATES:
            raise UsageError(f"{text!r}: updates is a number from 1 to {MAX_UPDATES}")
        updates = int(number)
    return Alone(own, updates, ":".join(rest) or DEFAULT_METHOD)
