"""Every assumption of the simulation in one place. Times are virtual seconds, sizes bytes on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SHARDS_UP_TO: Final = {8: 1500, 16: 3000, 32: 6000, 64: 1 << 30}  # nodes; docs/scale.md says why


def shards_for(num_nodes: int) -> int:
    """The number of shards to choose for a swarm of that size."""
    return next(shards for shards, most in SHARDS_UP_TO.items() if num_nodes <= most)


def simulated_shards_for(num_nodes: int, num_shards: int, *, most_nodes: int) -> int:
    """How many of the shards to simulate, so that about `most_nodes` are; at least two.

    Where a node's budget holds one shard, as with 100 members or more to a shard, shards hardly touch: a few of them,
    whose members read no others, are what they are among all.
    """
    return max(2, min(num_shards, most_nodes * num_shards // num_nodes))


class Role(StrEnum):
    """What a participant is."""

    HONEST = "honest"
    GARBAGE = "garbage"  # announces, and serves what the door refuses
    SILENT = "silent"  # announces, takes the question, and never answers
    FLOOD = "flood"  # announces without end what it does not have
    LEECH = "leech"  # pulls all it hears of and confirms nothing
    SYBIL = "sybil"  # one of many names of one host; makes far more groups than an honest node, all in good form


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """One simulated swarm."""

    num_nodes: int
    minutes: float = 5.0
    seed: int = 0
    num_shards: int = 8
    num_simulated_shards: int = 64  # of these all members are simulated, of the others none: they are only counted
    warm_up_s: float = 90.0  # nothing before it is reported
    settle_s: float = 90.0  # groups made in the last so many seconds are not reported: their time is not over

    # what nodes make and use
    groups_per_step: int = 12  # own, and as many foreign
    group_bytes: int = 29_300  # 12 completions of 300 tokens in the exact codec
    group_tokens: int = 3_600
    step_s: float = 85.0  # median; log-normal over nodes
    step_spread: float = 0.35  # sigma of its logarithm
    max_age_s: float = 1800.0
    max_ready_groups: int = 256

    # the policies' own parameters
    with_assignment: bool = True
    small_swarm: int = 16  # up to so many other members everybody pulls everything
    announcements_per_s: float = 50.0  # budget of what is heard
    max_wants: int = 256
    first_wait_s: float = 10.0  # of what nobody confirmed
    max_attempts: int = 4
    pulls_in_flight: int = 4
    pull_batch: int = 16
    pull_batch_bytes: int = 4 << 20
    pull_bytes_per_s: float = 4e6  # budget of what is pulled
    serve_share: float = 0.5  # of the uplink, for all peers
    serve_bytes_per_s_per_peer: float = 250e3
    burst_s: float = 8.0  # of both serving budgets
    gather_s: float = 0.2  # what is announced together is pulled together
    tick_s: float = 5.0  # between looks at what is unconfirmed and what is missing
    directory_s: float = 30.0  # between own records, and between looks at the shard's members
    record_lives_s: float = 90.0  # a member that left is known for so long
    census_s: float = 15.0  # the directory shows a newcomer after this, or twice or three times this
    busy_s: float = 0.5  # a peer that was busy is not asked for so long
    failed_s: float = 5.0  # nor is one that did not answer

    # the network
    loss: float = 0.05  # of announcements, for each reader
    gossip_delay_s: float = 0.3  # median from announcing to hearing; log-normal
    latency_s: float = 0.04  # median from a host to the backbone; log-normal
    slow_share: float = 0.3  # of the nodes
    slow_up_bytes_per_s: tuple[float, float] = (1e6, 10e6)  # log-uniform
    fast_up_bytes_per_s: tuple[float, float] = (10e6, 100e6)
    down_by_up: float = 4.0
    dial_timeout_s: float = 5.0
    pull_timeout_s: float = 30.0
    leave_share_per_hour: float = 0.2  # as many come

    # who attacks
    attackers_share: float = 0.1
    flood_per_s: float = 2.0  # announcements of a flooder
    sybil_factor: float = 5.0  # a sybil makes so many times what an honest node makes

    # what travels
    announcement_bytes: int = 300  # 80, and gossipsub's sender, sequence, topic, signature and frame
    request_bytes: int = 150
    id_bytes: int = 36  # of each group in a request or confirmation
    told_announcement_bytes: int = 90  # of each in an answer
    record_bytes: int = 300  # a member's entry in the directory
    hop_bytes: int = 600  # one step of a look-up in the table

    num_observed: int = 6  # nodes whose policy code is timed

    @property
    def end_s(self) -> float:
        """The whole time."""
        return self.minutes * 60


def copies_of(num_readers: int) -> float:
    """How often each of so many subscribers receives a gossipsub message: measured over loopback with real `p2pd`s.

    1.0 among 2, 5.7 among 8, 8.5 among 16, 8.7 among 24; a mesh of bounded degree gives no more in larger ones.
    """
    points = [(1, 0.0), (2, 1.0), (8, 5.7), (16, 8.5), (24, 8.7)]
    for (fewer, low), (more, high) in zip(points, points[1:], strict=False):
        if num_readers <= more:
            return low + (high - low) * max(0, num_readers - fewer) / (more - fewer)
    return points[-1][1]
