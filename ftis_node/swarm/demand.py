"""Pull rule: how many groups to pull, and who pulls an unwanted group.

A node pulls all groups in a small swarm, and as many as its learner needs in a large one. There each group is also
assigned to one member of the sender's shard, by rendezvous hashing (Thaler and Ravishankar, 1998). All members compute
the same assignment without communication. At random, a third of the groups would be pulled by nobody. If the assigned
member is absent or overloaded, the sender announces the group again, and the next member is assigned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from ftis_node.config.node import PullRule
from ftis_node.swarm.topology import shard_of

SMALL_SWARM = 16  # other members; the rule `auto` pulls all groups up to this number
STEPS_IN_STOCK = 2  # remote groups kept ready for the learner: for the next step and the one after it
MAX_ASSIGNED_STEPS = 4  # if more are in flight, a node leaves its assigned groups to the next member
MIN_MEMBERS_PER_SHARD = 4  # on average; with fewer, some shard contains only its sender
NUM_TURNS = 8  # members to which one group is assigned in turn; a node announces a group at most 5 times


def is_assigned(
    group_id: bytes,
    peer_id: str,
    members: Collection[str],
    *,
    sender: str | None = None,
    attempt: int = 0,
    is_eligible: Callable[[str], bool] = lambda _: True,
) -> bool:
    """Return whether `peer_id` is the member assigned to a group at this `attempt`.

    `members` has no duplicates. Its entries that are the `sender` or not `is_eligible` do not count; `peer_id` counts
    even if it is absent. `attempt` counts the earlier announcements of the group. It is a peer's claim, and counts
    modulo `NUM_TURNS`, because a large one would cost a hash for each member.

    The expected number of hashes is logarithmic in the members, since most nodes soon find a higher hash. Therefore
    nothing else here is done for every member of an unassigned group: no copy, and no call of `is_eligible`.
    """
    attempt %= NUM_TURNS
    own, excluded = _weight(group_id, peer_id), (peer_id, sender)
    num_above = 0
    for member in members:
        if member not in excluded and _weight(group_id, member) > own and is_eligible(member):
            num_above += 1
            if num_above > attempt:  # the turn below is at most `attempt`
                return False
    if num_above == attempt:
        return True
    num_others = sum(member not in excluded and is_eligible(member) for member in members)
    return num_above == attempt % (num_others + 1)


def assignment_order(group_id: bytes, members: Iterable[str]) -> list[str]:
    """Return the members in the order in which they are assigned to a group, one for each attempt."""
    return sorted(set(members), key=lambda member: _weight(group_id, member), reverse=True)


def eligible_members(
    sender: str, *, peer_id: str, known: Collection[str], shard_members: Collection[str], num_shards: int
) -> Collection[str] | None:
    """Return the members to which the sender's groups may be assigned; None if this node is not one of them.

    They are the members of the sender's shard. In a swarm so small that a shard may be empty, they are all `known`
    members, because every node knows every other there. The result is one of the two arguments, so it can contain the
    sender, which `is_assigned` skips.
    """
    if len(known) < MIN_MEMBERS_PER_SHARD * num_shards:
        return known
    return shard_members if shard_of(sender, num_shards) == shard_of(peer_id, num_shards) else None


def _weight(group_id: bytes, peer_id: str) -> bytes:
    return hashlib.blake2b(peer_id.encode(), key=group_id, digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class PullDemand:
    """Result of the pull rule. `need` is the number of groups to pull; None: all announced groups."""

    need: int | None
    takes_assigned: bool


def pulls_all(rule: PullRule, *, num_members: int) -> bool:
    return rule == "all" or (rule == "auto" and num_members <= SMALL_SWARM)


def pull_demand(rule: PullRule, *, num_members: int, per_step: int, num_ready: int, num_in_flight: int) -> PullDemand:
    """Return what to pull now, if a step takes `per_step` remote groups and `num_ready` wait for the learner.

    Assigned groups are pulled even if the learner needs none. Otherwise one group in ten would find no holder whenever
    a few nodes generate more than the learners use. Each assigned group costs one pull, and a node is assigned no more
    groups than an average member of its shard generates.
    """
    if pulls_all(rule, num_members=num_members):
        return PullDemand(need=None, takes_assigned=True)
    stock = num_ready + num_in_flight
    return PullDemand(
        need=max(0, STEPS_IN_STOCK * per_step - stock), takes_assigned=num_in_flight < MAX_ASSIGNED_STEPS * per_step
    )
