"""Attributes a rejected group to the peer that signed it, to the peer that sent it, or to none.

Any peer may serve any group, so that a group stays available if its creator is offline. Two rules keep that safe. A
reason found before the signature check is not charged to the named creator, because any peer can write that name. A
reason that a relaying peer cannot know is not charged to that peer. It knows form and signature, because its own
validation checks them. It does not know our clock, quotas or bans.
"""

from __future__ import annotations

from typing import NamedTuple

from ftis_node.swarm.reputation.score import Behaviour

ORIGIN_FAULT = {
    "unsolicited": Behaviour.REFUSED,
    "size": Behaviour.REFUSED,
    "parse": Behaviour.REFUSED,
    "malformed": Behaviour.REFUSED,
    "signature": Behaviour.FALSE_CLAIM,
}
NO_FAULT = frozenset(
    {
        *("version", "codec"),  # another software version
        *("banned", "duplicate", "sequence_reused", "stale", "clock_skew"),
        *("scoring_failed", "not_encodable", "scoring_quota"),  # this node scores and tokenizes
    }
)
SIGNER_FAULT = {
    "scoring_timeout": Behaviour.SLOW,
    "reward_mismatch": Behaviour.FALSE_CLAIM,
    "duplicate_of_own": Behaviour.FALSE_CLAIM,
    "duplicate_completions": Behaviour.COPIED,
}


class Attribution(NamedTuple):
    """The peer at fault and its behavior. The group also counts against that peer's quota."""

    peer_id: str
    conduct: Behaviour


def attribute_refusal(reason: str, *, origin: str, sender: str | None, signed: bool) -> Attribution:
    """Return the peer at fault: `origin` sent the group, `sender` is its named creator, verified if `signed`."""
    if conduct := ORIGIN_FAULT.get(reason):
        return Attribution(origin, conduct)
    if reason in NO_FAULT:
        return Attribution(origin, Behaviour.HARMLESS)
    if reason == "quota":
        return Attribution(origin, Behaviour.RATE_LIMITED if sender == origin else Behaviour.HARMLESS)
    if signed and sender is not None:
        return Attribution(sender, SIGNER_FAULT.get(reason, Behaviour.REFUSED))
    return Attribution(origin, Behaviour.REFUSED)
