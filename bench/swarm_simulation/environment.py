"""What participants of a simulated swarm need of their surroundings, as protocols; `world.World` implements them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    from swarm_simulation.announcement import AnnouncedGroup, AnnouncementEvent
    from swarm_simulation.events import Events
    from swarm_simulation.settings import SimulationSettings


class Reader(Protocol):
    """A node as the readers of a shard see it."""

    peer_id: str
    is_gone: bool
    num_heard: int
    announcement_bytes: float

    def receive(self, group: AnnouncedGroup, call: AnnouncementEvent, now: float) -> None: ...


class Environment(Protocol):
    """Settings, virtual time, random source, and the topics of all shards."""

    settings: SimulationSettings
    events: Events
    random: Random

    @property
    def readers(self) -> Sequence[dict[str, Reader]]: ...

    def known_readers(self) -> Mapping[int, int]: ...

    def new_id(self) -> bytes: ...

    def announce(self, group: AnnouncedGroup, *, attempt: int) -> None: ...
