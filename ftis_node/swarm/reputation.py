"""Reputation as a pure state machine: takes behavior and time, returns score, bans and their ends.

    score  10 |  maximum, so that a few false claims use up all credit
            0 |  a new peer
           -3 |  below: PROBATION (all its groups are audited)
          -10 |  at or below: BANNED for a time that doubles with each ban; afterwards the score is -5, on probation

Groups with a signal that a step used raise the score slowly (`node/peers/copied_groups.py`). Refused groups lower it,
and false claims lower it strongly. Events that honest peers also cause do not change it. A negative score decays
towards 0. Each day without a ban reduces the number of past bans by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

MAX_SCORE = 10.0
WATCH_SCORE = -3.0
BAN_SCORE = -10.0
SCORE_AFTER_BAN = -5.0
KNOWN_SCORE = 1.0  # from this score on a peer has its own rate limits
NO_FLOOR = -1e9
HALF_LIFE_S = 1800.0  # of a negative score
FORGIVE_BAN_S = 86400.0
FIRST_BAN_S = 300.0  # each further ban is twice as long
LONGEST_BAN_S = 86400.0
BY_OPERATOR = "by the operator"
EVICTED_FRACTION = 8  # one peer in 8
MAX_REASONS = 32


class Behaviour(StrEnum):
    ACCEPTED = "accepted"  # one of its groups was accepted
    CONTRIBUTED = "contributed"  # a step used one of its groups
    HARMLESS = "harmless"  # a group was not usable, for a reason that honest peers also cause
    PULL_FAILED = "pull_failed"  # it announced a group and did not serve it
    RATE_LIMITED = "rate_limited"  # it exceeded its rate limit
    SLOW = "slow"  # scoring its completions took the whole time limit; ten cases in a short time lead to a ban
    COPIED = "copied"  # completions that it or a known peer sent before
    DISPLACED = "displaced"  # an equal group of another peer was announced before its group
    REFUSED = "refused"  # input that no honest node of this run sends
    FAULT = "fault"  # its input caused an unexpected exception in this node
    FALSE_CLAIM = "false_claim"  # a wrong claim under its own signature, or a forged one


class ScoreChange(NamedTuple):
    """Effect on the score: `points` are added, but alone never move it below `floor` or above `most`."""

    points: float
    floor: float = NO_FLOOR
    most: float = MAX_SCORE


SCORE_CHANGES = {
    Behaviour.ACCEPTED: ScoreChange(0.02, most=2.0),  # maximum credit for valid but unused groups
    Behaviour.CONTRIBUTED: ScoreChange(0.1),
    Behaviour.DISPLACED: ScoreChange(-0.12, floor=0.0),  # withdraws the credit, and never harms the original
    Behaviour.HARMLESS: ScoreChange(0.0),
    Behaviour.PULL_FAILED: ScoreChange(-0.25, floor=WATCH_SCORE),
    Behaviour.RATE_LIMITED: ScoreChange(-0.25),
    Behaviour.SLOW: ScoreChange(-1.0),
    Behaviour.COPIED: ScoreChange(-1.0, floor=WATCH_SCORE - 1.0),
    Behaviour.REFUSED: ScoreChange(-2.0),
    Behaviour.FAULT: ScoreChange(-2.0),
    Behaviour.FALSE_CLAIM: ScoreChange(-4.0),
}


class TrustLevel(StrEnum):
    TRUSTED = "trusted"  # set by the operator: never banned automatically
    GOOD = "good"
    PROBATION = "probation"
    BANNED = "banned"


@dataclass(frozen=True, slots=True)
class Reputation:
    """Reputation of one peer. `score` is as of `updated_at`; times are Unix seconds, valid across restarts."""

    score: float = 0.0
    updated_at: float = 0.0
    banned_until: float = 0.0
    ban_reason: str = ""
    num_bans: int = 0
    trusted: bool = False

    def is_banned(self, *, now: float) -> bool:
        return now < self.banned_until

    def trust_level(self, *, now: float) -> TrustLevel:
        if self.is_banned(now=now):
            return TrustLevel.BANNED
        if self.trusted:
            return TrustLevel.TRUSTED
        return TrustLevel.PROBATION if self.score_at(now) < WATCH_SCORE else TrustLevel.GOOD

    def by_clock(self, now: float) -> Reputation:
        """Return the record adjusted to a clock that was set back, so that no ban becomes longer."""
        back_s = self.updated_at - now
        if back_s <= 0:
            return self
        return replace(self, updated_at=now, banned_until=max(0.0, self.banned_until - back_s))

    def is_known(self, *, now: float) -> bool:
        """Return whether the peer has earned its own rate limits; all other peers share one set."""
        return self.trusted or self.score_at(now) >= KNOWN_SCORE

    def score_at(self, now: float) -> float:
        if self.score >= 0:
            return self.score
        away_s = max(0.0, now - max(self.updated_at, self.banned_until))
        return float(self.score * 0.5 ** (away_s / HALF_LIFE_S))

    def after(self, behaviour: Behaviour, *, now: float, reason: str = "", credit: float = 1.0) -> Reputation:
        """Return the record after one behavior; unchanged during a ban. Users see `reason`.

        `credit` is the fraction of the points that count.
        """
        if self.is_banned(now=now):
            return self
        points, floor, most = SCORE_CHANGES[behaviour]
        points *= credit
        score = self.score_at(now)
        moved = min(max(score, most), score + points) if points >= 0 else max(min(score, floor), score + points)
        forgiven = self._after_forgiving(now)
        if moved > BAN_SCORE or self.trusted:
            return replace(forgiven, score=max(moved, BAN_SCORE), updated_at=now)
        length_s = min(LONGEST_BAN_S, FIRST_BAN_S * 2.0 ** min(forgiven.num_bans, 64))
        return forgiven.banned(length_s, now=now, reason=reason or behaviour)

    def banned(self, length_s: float, *, now: float, reason: str) -> Reputation:
        return replace(
            self,
            score=SCORE_AFTER_BAN,
            updated_at=now,
            banned_until=now + length_s,
            ban_reason=reason,
            num_bans=self.num_bans + 1,
        )

    def unbanned(self, *, now: float) -> Reputation:
        """Return a clean record, for an operator who ends a ban."""
        return replace(self, score=max(0.0, self.score), updated_at=now, banned_until=0.0, ban_reason="", num_bans=0)

    def with_trust(self, trusted: bool, *, now: float) -> Reputation:
        """Return the record as trusted and without a ban, or no longer as trusted."""
        return replace(self.unbanned(now=now) if trusted else self, trusted=trusted)

    def _after_forgiving(self, now: float) -> Reputation:
        """Return the record with one past ban fewer for each day without a ban."""
        days = int(max(0.0, now - self.banned_until) // FORGIVE_BAN_S) if self.num_bans else 0
        return replace(
            self, num_bans=max(0, self.num_bans - days), banned_until=self.banned_until + days * FORGIVE_BAN_S
        )


NEW_PEER = Reputation()
GOOD_BEHAVIOUR = frozenset({Behaviour.ACCEPTED, Behaviour.CONTRIBUTED})


@dataclass(slots=True)
class PeerReputation:
    """One peer: its reputation, how often each reason was noted, and the time of the last note (Unix seconds)."""

    reputation: Reputation = field(default_factory=Reputation)
    reasons: Counter[str] = field(default_factory=Counter)
    noted_at: float = 0.0


class ReputationTable:
    """Bounded table of peers and their reputations. `now` is Unix time in seconds.

    If it is full, the peers with the least information are dropped first. Peers that the operator banned or trusts are
    kept. Of the others, peers with their own rate limits are dropped last, and before them those with the longest bans.
    """

    def __init__(self, *, max_peers: int = 4096) -> None:
        self._max_peers = max_peers
        self._peers: dict[str, PeerReputation] = {}
        self.changed: set[str] = set()  # peers to save; the owner clears the set
        self.forgotten: set[str] = set()  # peers to delete; the owner clears the set

    def __iter__(self) -> Iterator[tuple[str, PeerReputation]]:
        return iter(list(self._peers.items()))

    def put(self, peer_id: str, record: PeerReputation) -> None:
        self._peers[peer_id] = record

    def reputation(self, peer_id: str) -> Reputation:
        record = self._peers.get(peer_id)
        return NEW_PEER if record is None else record.reputation

    def record_of(self, peer_id: str) -> PeerReputation:
        return self._peers.get(peer_id) or PeerReputation()

    def is_banned(self, peer_id: str, *, now: float) -> bool:
        return self.reputation(peer_id).is_banned(now=now)

    def note(
        self, peer_id: str, behaviour: Behaviour, *, now: float, reason: str = "", credit: float = 1.0
    ) -> TrustLevel | None:
        """Record one behavior of a peer; return the new trust level if it changed."""
        name = reason or behaviour.value
        before = self.reputation(peer_id)
        after = before.after(behaviour, now=now, reason=name, credit=credit)
        record = self._set(peer_id, after, now=now)
        if behaviour not in GOOD_BEHAVIOUR and (name in record.reasons or len(record.reasons) < MAX_REASONS):
            record.reasons[name] += 1
        trust_level = record.reputation.trust_level(now=now)
        return trust_level if trust_level is not before.trust_level(now=now) else None

    def ban(self, peer_id: str, length_s: float, *, now: float) -> None:
        """Ban a peer on behalf of the operator, and remove its trust."""
        without_trust = self.reputation(peer_id).with_trust(False, now=now)
        self._set(peer_id, without_trust.banned(length_s, now=now, reason=BY_OPERATOR), now=now)

    def unban(self, peer_id: str, *, now: float) -> None:
        self._set(peer_id, self.reputation(peer_id).unbanned(now=now), now=now)

    def trust(self, peer_id: str, trusted: bool, *, now: float) -> None:
        self._set(peer_id, self.reputation(peer_id).with_trust(trusted, now=now), now=now)

    def _set(self, peer_id: str, reputation: Reputation, *, now: float) -> PeerReputation:
        record = self._peers.get(peer_id)
        if record is None:
            self._evict(now)
            record = self._peers[peer_id] = PeerReputation()
            self.forgotten.discard(peer_id)
        record.reputation, record.noted_at = reputation, now
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
