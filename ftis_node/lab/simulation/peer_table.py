"""What one node makes of its peers' conduct: reputation, bans and quotas, as the door would."""

from __future__ import annotations

from ftis_node.swarm.reputation.rate_limits import QuotaLimits, Quotas
from ftis_node.swarm.reputation.score import BanRules, Behaviour, Reputation

UNKNOWN = Reputation()
LIMITS = QuotaLimits()
RULES = BanRules()


class PeerTable:
    """Of the peers that this node has dealt with."""

    __slots__ = ("_quotas", "banned_at", "records")

    def __init__(self) -> None:
        self.records: dict[str, Reputation] = {}
        self.banned_at: dict[str, float] = {}  # first
        self._quotas = Quotas(LIMITS)

    def is_banned(self, peer_id: str, *, now: float) -> bool:
        """Whether nothing is taken from it now."""
        record = self.records.get(peer_id)
        return record is not None and record.is_banned(now=now)

    def note(self, peer_id: str, conduct: Behaviour, *, now: float) -> None:
        """A deed."""
        record = self.records.get(peer_id, UNKNOWN).after(conduct, now=now, rules=RULES)
        self.records[peer_id] = record
        if record.num_bans and peer_id not in self.banned_at:
            self.banned_at[peer_id] = now

    def refused(self, peer_id: str, *, now: float) -> None:
        """The door refused what that peer handed over."""
        self.note(peer_id, Behaviour.REFUSED, now=now)

    def admits(self, sender: str, num_tokens: int, *, now: float) -> bool:
        """Whether the quota has room for a good group, which then counts."""
        is_stranger = not self.records.get(sender, UNKNOWN).is_known(now=now)
        if not self._quotas.allows(sender, is_new_peer=is_stranger, now=now):
            self.note(sender, Behaviour.FLOODED, now=now)
            return False
        self._quotas.spend(sender, num_tokens, is_new_peer=is_stranger, now=now)
        self.note(sender, Behaviour.ACCEPTED, now=now)
        return True
