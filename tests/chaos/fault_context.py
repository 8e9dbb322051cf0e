"""The context in which a fault runs: the swarm, the node that it affects, and a seeded random generator."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.chaos.swarm import Swarm, SwarmNode


class Refusal(NamedTuple):
    """How a node must refuse to start: its exit code, and a part of its last log line."""

    exit_code: int
    text: str


@dataclass
class FaultContext:
    """The context of one fault. `node` is the affected node."""

    swarm: Swarm
    node: SwarmNode
    rng: random.Random
    notes: list[str] = field(default_factory=list)
    refusal: Refusal | None = None
    _undoing: ExitStack = field(default_factory=ExitStack)

    def note(self, text: str) -> None:
        """Record a detail of the fault for the report, such as a byte offset or a process id."""
        self.notes.append(text)

    def undo(self, action: Callable[[], object]) -> None:
        """Register `action` for `undo_all`."""
        self._undoing.callback(action)

    def expect_refusal(self, exit_code: int, text: str) -> None:
        """Expect that the next start ends with this code and with this text in its last log line."""
        self.refusal = Refusal(exit_code, text)

    def undo_all(self) -> None:
        """Run the registered actions in reverse order: after the fault or the refusal, before the node recovers."""
        self._undoing.close()
