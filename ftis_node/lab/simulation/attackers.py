"""What attackers do. They stand in the directory like everybody, so duties fall to them, which they do not do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ftis_node.lab.simulation.node import SimulatedNode
from ftis_node.lab.simulation.peer import Peer
from ftis_node.lab.simulation.settings import Role

if TYPE_CHECKING:
    from collections.abc import Iterable


class Garbage(Peer):
    """Announces as an honest node does, and serves what the door refuses."""

    role = Role.GARBAGE

    def make(self) -> None:
        """A worthless group, and the next after a while."""
        self.publish(is_valid=False)
        self.world.events.after(self.period_s, self.make)


class Silent(Garbage):
    """Announces, takes the question, and never answers: the asker waits until its time is over."""

    role = Role.SILENT


class Flood(Garbage):
    """Announces many groups a second and has none of them."""

    role = Role.FLOOD

    @property
    def period_s(self) -> float:
        """Between two announcements."""
        return 1.0 / self.world.settings.flood_per_s

    def find(self, group_ids: Iterable[bytes]) -> set[bytes]:
        """None."""
        return set()


class Sybil(Peer):
    """One of many names of one host: its groups pass the door, and there are far more of them than of honest nodes."""

    role = Role.SYBIL

    @property
    def period_s(self) -> float:
        """Between two groups."""
        return super().period_s / self.world.settings.sybil_factor


class Leech(SimulatedNode):
    """Pulls all it hears of, as fast as it is served, makes nothing and tells nobody what it has."""

    role = Role.LEECH
    confirms = False
    pulls_all = True

    def make(self) -> None:
        """Nothing."""


KINDS: Final[tuple[type[Peer], ...]] = (Garbage, Silent, Flood, Leech, Sybil)
