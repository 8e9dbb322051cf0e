"""A node's records of its peers."""

from __future__ import annotations

from ftis_node.swarm.rate_limits import Quotas
from ftis_node.swarm.reputation import Behaviour, Reputation

UNKNOWN = Reputation()


class PeerTable:
    """Reputations and quotas of the peers that this node interacted with."""

    __slots__ = ("_quotas", "banned_at", "records")

    def __init__(self) -> None:
        self.records: dict[str, Reputation] = {}
        self.banned_at: dict[str, float] = {}  # time of the first ban
        self._quotas = Quotas()

    def is_banned(self, peer_id: str, *, now: float) -> bool:
        record = self.records.get(peer_id)
        return record is not None and record.is_banned(now=now)

    def note(self, peer_id: str, behaviour: Behaviour, *, now: float) -> None:
        """Apply one `behaviour`."""
        record = self.records.get(peer_id, UNKNOWN).after(behaviour, now=now)
        self.records[peer_id] = record
        if record.num_bans and peer_id not in self.banned_at:
            self.banned_at[peer_id] = now

    def refused(self, peer_id: str, *, now: float) -> None:
        """Note an invalid group from that peer."""
        self.note(peer_id, Behaviour.REFUSED, now=now)

    def admits(self, sender: str, num_tokens: int, *, now: float) -> bool:
        """Return whether the quota admits a valid group, and charge it."""
        is_new_peer = not self.records.get(sender, UNKNOWN).is_known(now=now)
        if not self._quotas.allows(sender, is_new_peer=is_new_peer, now=now):
            if not self._quotas.allows(sender, is_new_peer=False, now=now):
                self.note(sender, Behaviour.RATE_LIMITED, now=now)
            return False
        self._quotas.spend(sender, num_tokens, is_new_peer=is_new_peer, now=now)
        self.note(sender, Behaviour.ACCEPTED, now=now)
        return True
