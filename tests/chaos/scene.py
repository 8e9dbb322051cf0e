"""What a fault is given: the swarm, the node that it is done to, and dice of its own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.chaos.swarm import Swarm, SwarmNode


class Refusal(NamedTuple):
    """How a node must refuse to start: its exit code, and words that stand in its last line."""

    exit_code: int
    words: str


@dataclass
class Scene:
    """One fault's surroundings. `node` is the victim: its home, its running process, its workers by role."""

    swarm: Swarm
    node: SwarmNode
    rng: random.Random
    notes: list[str] = field(default_factory=list)
    refusal: Refusal | None = None
    _undoing: ExitStack = field(default_factory=ExitStack)

    def note(self, what: str) -> None:
        """What exactly was done (which byte, which process), for the report's line."""
        self.notes.append(what)

    def undo(self, action: Callable[[], object]) -> None:
        """Has `action` run when the fault is over: before the node recovers, or, where it refuses, after it did."""
        self._undoing.callback(action)

    def expect_refusal(self, exit_code: int, words: str) -> None:
        """The next start must end with this code and a last line that has these words; then comes what `undo` heals."""
        self.refusal = Refusal(exit_code, words)

    def heal(self) -> None:
        """Takes back what was done, last first."""
        self._undoing.close()
