"""What a peer's conduct makes of its standing: facts in, a score, bans and their ends out.

    score  10 |  most that can be earned: no credit that a lie could not use up
            0 |  a stranger
           -3 |  below: WATCHED (all its groups are audited)
          -10 |  here: BANNED for a time that doubles with each ban; it comes back at -5, watched

Groups that a step learned from raise the score slowly; refusals lower it, lies much; what may happen to an honest
peer (a late group, one that two peers handed over, a scorer that ran out of time) leaves it. What is below 0 is
forgiven with time, and so are bans, one for each day without another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

MAX_SCORE = 10.0
WATCH_SCORE = -3.0
BAN_SCORE = -10.0
SCORE_AFTER_BAN = -5.0
KNOWN_SCORE = 1.0  # above: no stranger any more
NO_FLOOR = -1e9
HALF_LIFE_S = 1800.0  # of what is below 0
FORGIVE_BAN_S = 86400.0


class Behaviour(StrEnum):
    """What a peer did."""

    ACCEPTED = "accepted"  # a group of its own passed the door
    TAUGHT = "taught"  # a step learned from one of its groups
    MISHAP = "mishap"  # a group was of no use, and that may happen to anyone
    PULL_FAILED = "pull_failed"  # it announced and did not deliver
    FLOODED = "flooded"  # more than its quota
    SLOW = "slow"  # scoring its completions took the whole time limit: ten times in a short while is no accident
    COPIED = "copied"  # completions that another peer's group had before; who was first is not certain
    REFUSED = "refused"  # what no honest node of this run sends
    FAULT = "fault"  # its values made code of this node raise what nobody expected
    LIED = "lied"  # a wrong claim under its own signature, or a forged one


class ScoreChange(NamedTuple):
    """What such a deed does: `points` are added, but alone never take the score below `floor` or above `most`."""

    points: float
    floor: float = NO_FLOOR
    most: float = MAX_SCORE


SCORE_CHANGES = {
    Behaviour.ACCEPTED: ScoreChange(0.02, most=2.0),  # worthless groups in good form make nobody more than known
    Behaviour.TAUGHT: ScoreChange(0.1),
    Behaviour.MISHAP: ScoreChange(0.0),
    Behaviour.PULL_FAILED: ScoreChange(-0.25, floor=WATCH_SCORE),
    Behaviour.FLOODED: ScoreChange(-0.25),
    Behaviour.SLOW: ScoreChange(-1.0),
    Behaviour.COPIED: ScoreChange(-1.0, floor=WATCH_SCORE - 1.0),
    Behaviour.REFUSED: ScoreChange(-2.0),
    Behaviour.FAULT: ScoreChange(-2.0),
    Behaviour.LIED: ScoreChange(-4.0),
}


class TrustLevel(StrEnum):
    """How a peer is met."""

    TRUSTED = "trusted"  # by the operator's word: never banned by the node itself
    GOOD = "good"
    WATCHED = "watched"
    BANNED = "banned"


@dataclass(frozen=True, slots=True)
class BanRules:
    """How long bans last, in seconds."""

    first_s: float = 300.0
    longest_s: float = 86400.0

    def length_s(self, num_bans: int) -> float:
        """Of the ban after `num_bans` others."""
        return min(self.longest_s, self.first_s * 2.0 ** min(num_bans, 64))


@dataclass(frozen=True, slots=True)
class Reputation:
    """One peer's record. `score` is that of `updated_at`; all times are Unix seconds, for they outlive the node."""

    score: float = 0.0
    updated_at: float = 0.0
    banned_until: float = 0.0
    ban_reason: str = ""
    num_bans: int = 0
    trusted: bool = False

    def is_banned(self, *, now: float) -> bool:
        """Whether a ban is running."""
        return now < self.banned_until

    def trust_level(self, *, now: float) -> TrustLevel:
        """How the peer is met now."""
        if self.is_banned(now=now):
            return TrustLevel.BANNED
        if self.trusted:
            return TrustLevel.TRUSTED
        return TrustLevel.WATCHED if self.score_at(now) < WATCH_SCORE else TrustLevel.GOOD

    def by_clock(self, now: float) -> Reputation:
        """The record by a clock that was set back since it was written: no ban grows longer by that."""
        back_s = self.updated_at - now
        if back_s <= 0:
            return self
        return replace(self, updated_at=now, banned_until=max(0.0, self.banned_until - back_s))

    def is_known(self, *, now: float) -> bool:
        """Whether it has shown something: all others together have one allowance."""
        return self.trusted or self.score_at(now) >= KNOWN_SCORE

    def score_at(self, now: float) -> float:
        """The score, less what was forgiven since."""
        if self.score >= 0:
            return self.score
        away_s = max(0.0, now - max(self.updated_at, self.banned_until))
        return float(self.score * 0.5 ** (away_s / HALF_LIFE_S))

    def after(self, conduct: Behaviour, *, now: float, rules: BanRules, reason: str = "") -> Reputation:
        """The record after one deed. While a ban runs nothing changes; `reason` is for people."""
        if self.is_banned(now=now):
            return self
        points, floor, most = SCORE_CHANGES[conduct]
        score = self.score_at(now)
        moved = min(max(score, most), score + points) if points >= 0 else max(min(score, floor), score + points)
        forgiven = self._after_forgiving(now)
        if moved > BAN_SCORE or self.trusted:
            return replace(forgiven, score=max(moved, BAN_SCORE), updated_at=now)
        return forgiven.banned(rules.length_s(forgiven.num_bans), now=now, reason=reason or conduct)

    def banned(self, length_s: float, *, now: float, reason: str) -> Reputation:
        """The record with a ban that starts now."""
        return replace(
            self,
            score=SCORE_AFTER_BAN,
            updated_at=now,
            banned_until=now + length_s,
            ban_reason=reason,
            num_bans=self.num_bans + 1,
        )

    def unbanned(self, *, now: float) -> Reputation:
        """A clean record, by the operator's word."""
        return replace(self, score=max(0.0, self.score), updated_at=now, banned_until=0.0, ban_reason="", num_bans=0)

    def with_trust(self, trusted: bool, *, now: float) -> Reputation:
        """Trusted, and then no longer banned; or trusted no longer."""
        return replace(self.unbanned(now=now) if trusted else self, trusted=trusted)

    def _after_forgiving(self, now: float) -> Reputation:
        """The record less the bans that have been lived down."""
        if not self.num_bans:
            return self
        lived_down = int(max(0.0, now - self.banned_until) // FORGIVE_BAN_S)
        if not lived_down:
            return self
        return replace(
            self,
            num_bans=max(0, self.num_bans - lived_down),
            banned_until=self.banned_until + lived_down * FORGIVE_BAN_S,
        )
