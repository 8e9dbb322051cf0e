"""Whose fault a refusal at the door is: the peer that signed the group, the one that handed it over, or nobody's.

Anyone may hand over anyone's envelope, so that what its sender cannot deliver is still to be had. Two rules keep that
safe. What stands before the signature in the door's order cannot be held against the sender that the body names, for
anybody can write a name. And what a peer that only passes a group on cannot know is not held against it: it knows
form and signature, for its own door looked at them; not our clock, our quotas or our bans.
"""

from __future__ import annotations

from typing import NamedTuple

from ftis_node.swarm.reputation.score import Conduct

ORIGINS_FAULT = {
    "unasked": Conduct.REFUSED,
    "size": Conduct.REFUSED,
    "parse": Conduct.REFUSED,
    "malformed": Conduct.REFUSED,
    "signature": Conduct.LIED,
}
NOBODYS_FAULT = frozenset(
    {
        *("version", "codec"),  # another version of the software
        *("banned", "duplicate", "number", "stale", "clock"),
        *("unscored", "text", "scoring_quota"),  # ours to score, and to say in our tokens
    }
)
SIGNERS_FAULT = {
    "scoring_time": Conduct.SLOW,
    "reward": Conduct.LIED,
    "copy_ours": Conduct.LIED,
    "copy": Conduct.COPIED,
}


class Blame(NamedTuple):
    """What is noted of whom. That peer also pays for the group out of its quota."""

    peer_id: str
    conduct: Conduct


def blame_for(reason: str, *, origin: str, sender: str | None, signed: bool) -> Blame:
    """Who answers for a refusal: `origin` handed the group over, `sender` is whom it names; `signed`: it proved so."""
    if conduct := ORIGINS_FAULT.get(reason):
        return Blame(origin, conduct)
    if reason in NOBODYS_FAULT:
        return Blame(origin, Conduct.MISHAP)
    if reason == "quota":
        return Blame(origin, Conduct.FLOODED if sender == origin else Conduct.MISHAP)
    if signed and sender is not None:
        return Blame(sender, SIGNERS_FAULT.get(reason, Conduct.REFUSED))
    return Blame(origin, Conduct.REFUSED)
