"""What a node's network counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.gossip.interface import FetchOutcome


@dataclass(slots=True)
class GossipCounters:
    """What happened since the start. Only this room writes it."""

    announcements_sent: int = 0
    announcements_received: int = 0
    announcements_dropped: int = 0  # the queue was full
    announcements_refused: int = 0  # over the size limit, or not sealed with the run's secret
    announcements_unsent: int = 0  # the network process was down
    bodies_in: int = 0
    bodies_out: int = 0
    body_bytes_in: int = 0
    body_bytes_out: int = 0
    weights_bytes_in: int = 0  # chunks of weights, their hashes, offers
    weights_bytes_out: int = 0
    confirmed_in: int = 0  # ids that peers confirmed to us
    confirmed_out: int = 0
    fetch_errors: dict[str, int] = field(default_factory=dict)  # by FetchOutcome
    serve_errors: dict[str, int] = field(default_factory=dict)  # streams served that ended early, by reason
    records_refused: int = 0  # of the directory: not their owner's, too large, or for too long
    non_ed25519: dict[str, int] = field(default_factory=dict)  # ignored for the type of their peer's key, by what it is
    restarts: int = 0  # of the network process

    def count_fetch_error(self, outcome: FetchOutcome) -> None:
        """One pull that did not complete."""
        self.fetch_errors[outcome.value] = self.fetch_errors.get(outcome.value, 0) + 1

    def count_non_ed25519(self, what: str) -> None:
        """One connection, message or stream of a peer whose id holds no Ed25519 key."""
        self.non_ed25519[what] = self.non_ed25519.get(what, 0) + 1

    def count_refused_record(self) -> None:
        """One directory record that was neither stored nor believed."""
        self.records_refused += 1

    def count_serve_error(self, reason: str) -> None:
        """One served stream that ended early."""
        self.serve_errors[reason] = self.serve_errors.get(reason, 0) + 1
