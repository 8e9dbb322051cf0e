"""Reputation of all known peers, bounded, so that a thousand new identities cost no memory.

When the table is full, the peers with the least information are dropped first. Peers that the operator banned or trusts
are kept. Of the others, peers with their own rate limits are dropped last, and before them those with the longest bans.
A dropped identity counts as a new peer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftis_node.swarm.reputation.score import BanRules, Behaviour, Reputation, TrustLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BY_OPERATOR = "by the operator"
EVICTED_FRACTION = 8  # one peer in 8
MAX_REASONS = 32
NEW_PEER = Reputation()
GOOD_BEHAVIOUR = frozenset({Behaviour.ACCEPTED, Behaviour.CONTRIBUTED})


@dataclass(slots=True)
class PeerReputation:
    """One peer: its reputation, how often each reason was noted, and the time of the last note (Unix seconds)."""

    reputation: Reputation = field(default_factory=Reputation)
    reasons: Counter[str] = field(default_factory=Counter)
    noted_at: float = 0.0


class ReputationTable:
    """Bounded table of peers and their reputations. `now` is Unix time in seconds."""

    def __init__(self, rules: BanRules | None = None, *, max_peers: int = 4096) -> None:
        self._rules = rules or BanRules()
        self._max_peers = max_peers
        self._peers: dict[str, PeerReputation] = {}
        self.changed: set[str] = set()  # peers to save; the owner clears the set
        self.forgotten: set[str] = set()  # peers to delete; the owner clears the set

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[tuple[str, PeerReputation]]:
        return iter(list(self._peers.items()))

    def put(self, peer_id: str, record: PeerReputation) -> None:
        """Restore a record saved by an earlier process."""
        self._peers[peer_id] = record

    def reputation(self, peer_id: str) -> Reputation:
        """Return a peer's reputation; that of a new peer if the peer is unknown."""
        record = self._peers.get(peer_id)
        return NEW_PEER if record is None else record.reputation

    def record_of(self, peer_id: str) -> PeerReputation:
        """Return a peer's record; a new one if the peer is unknown."""
        return self._peers.get(peer_id) or PeerReputation()

    def is_banned(self, peer_id: str, *, now: float) -> bool:
        record = self._peers.get(peer_id)
        return record is not None and record.reputation.is_banned(now=now)

    def note(self, peer_id: str, conduct: Behaviour, *, now: float, reason: str = "") -> TrustLevel | None:
        """Record one behavior of a peer; return the new trust level if it changed."""
        name = reason or conduct.value
        before = self.reputation(peer_id).trust_level(now=now)
        record = self._change(peer_id, lambda was: was.after(conduct, now=now, rules=self._rules, reason=name), now=now)
        if conduct not in GOOD_BEHAVIOUR and (name in record.reasons or len(record.reasons) < MAX_REASONS):
            record.reasons[name] += 1
        standing = record.reputation.trust_level(now=now)
        return standing if standing is not before else None

    def ban(self, peer_id: str, length_s: float, *, now: float) -> None:
        """Ban a peer on behalf of the operator, and remove its trust."""
        self._change(
            peer_id,
            lambda was: was.with_trust(False, now=now).banned(length_s, now=now, reason=BY_OPERATOR),
            now=now,
        )

    def unban(self, peer_id: str, *, now: float) -> None:
        """End a ban and forget past bans."""
        self._change(peer_id, lambda was: was.unbanned(now=now), now=now)

    def trust(self, peer_id: str, trusted: bool, *, now: float) -> None:
        self._change(peer_id, lambda was: was.with_trust(trusted, now=now), now=now)

    def _change(self, peer_id: str, change: Callable[[Reputation], Reputation], *, now: float) -> PeerReputation:
        record = self._peers.get(peer_id)
        if record is None:
            self._evict(now)
            record = self._peers[peer_id] = PeerReputation()
            self.forgotten.discard(peer_id)
        record.reputation, record.noted_at = change(record.reputation), now
        self.changed.add(peer_id)
        return record

    def _evict(self, now: float) -> None:
        if len(self._peers) < self._max_peers:
            return

        def interest(item: tuple[str, PeerReputation]) -> tuple[bool, bool, float, float, float]:
            known, record = item[1].reputation, item[1]
            by_operator = known.trusted or (known.is_banned(now=now) and known.ban_reason == BY_OPERATOR)
            ban_left_s = max(0.0, known.banned_until - now)
            return by_operator, known.is_known(now=now), ban_left_s, abs(known.score_at(now)), record.noted_at

        by_interest = sorted(self._peers.items(), key=interest)
        for peer_id, _ in by_interest[: max(1, len(by_interest) // EVICTED_FRACTION)]:
            del self._peers[peer_id]
            self.changed.discard(peer_id)
            self.forgotten.add(peer_id)
