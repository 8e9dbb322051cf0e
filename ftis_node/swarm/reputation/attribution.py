"""Whose fault a refusal at the door is: the peer that signed the group, the one that handed it over, or nobody's.

Anyone may hand over anyone's envelope, so that what its sender cannot deliver is still to be had. Two rules keep that
safe. What stands before the signature in the door's order cannot be held against the sender that the body names, for
anybody can write a name. And what a peer that only passes a group on cannot know is not held against it: it knows
form and signature, for its own door looked at them; not our clock, our quotas or our bans.
"""

from __future__ import annotations

from typing import NamedTuple

from ftis_node.swarm.reputation.score import Behaviour

ORIGIN_FAULT = {
    "unasked": Behaviour.REFUSED,
    "size": Behaviour.REFUSED,
    "parse": Behaviour.REFUSED,
    "malformed": Behaviour.REFUSED,
    "signature": Behaviour.LIED,
}
NO_FAULT = frozenset(
    {
        *("version", "codec"),  # another version of the software
        *("banned", "duplicate", "number", "stale", "clock"),
        *("unscored", "text", "scoring_quota"),  # ours to score, and to say in our tokens
    }
)
SIGNER_FAULT = {
    "scoring_time": Behaviour.SLOW,
    "reward": Behaviour.LIED,
    "copy_ours": Behaviour.LIED,
    "copy": Behaviour.COPIED,
}


class Attribution(NamedTuple):
    """What is noted of whom. That peer also pays for the group out of its quota."""

    peer_id: str
    conduct: Behaviour


def attribute_refusal(reason: str, *, origin: str, sender: str | None, signed: bool) -> Attribution:
    """Who answers for a refusal: `origin` handed the group over, `sender` is whom it names; `signed`: it proved so."""
    if conduct := ORIGIN_FAULT.get(reason):
        return Attribution(origin, conduct)
    if reason in NO_FAULT:
        return Attribution(origin, Behaviour.MISHAP)
    if reason == "quota":
        return Attribution(origin, Behaviour.FLOODED if sender == origin else Behaviour.MISHAP)
    if signed and sender is not None:
        return Attribution(sender, SIGNER_FAULT.get(reason, Behaviour.REFUSED))
    return Attribution(origin, Behaviour.REFUSED)
