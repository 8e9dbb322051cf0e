"""Attackers. They are listed in the directory like all members, so groups are assigned to them that they do not
pull.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from swarm_simulation.node import SimulatedNode
from swarm_simulation.settings import Role
from swarm_simulation.world import Peer


class Garbage(Peer):
    """Announces like an honest node, and serves invalid groups."""

    role = Role.GARBAGE

    def make(self) -> None:
        """Publish an invalid group and schedule the next."""
        self.publish(is_valid=False)
        self.world.events.after(self.period_s, self.make)


class Silent(Garbage):
    """Announces and never answers: the requests time out."""

    role = Role.SILENT


class Flood(Garbage):
    """Announces many groups a second and has none of them."""

    role = Role.FLOOD

    @property
    def period_s(self) -> float:
        return 1.0 / self.world.settings.flood_per_s

    def find(self, group_ids: Iterable[bytes]) -> set[bytes]:
        return set()


class Sybil(Peer):
    """One of many identities of one host: valid groups, far more than those of an honest node."""

    role = Role.SYBIL

    @property
    def period_s(self) -> float:
        return super().period_s / self.world.settings.sybil_factor


class Leech(SimulatedNode):
    """Pulls every group as fast as possible, generates none and confirms none."""

    role = Role.LEECH
    confirms = False
    pulls_all = True

    def make(self) -> None:
        """Do nothing."""


KINDS: Final[tuple[type[Peer], ...]] = (Garbage, Silent, Flood, Leech, Sybil)
