"""All assumptions of the simulation. Times are virtual seconds, sizes are bytes on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SHARDS_UP_TO: Final = {8: 1500, 16: 3000, 32: 6000, 64: 1 << 30}  # nodes; docs/develop/testing.md explains why

NUM_VIEWS: Final = 3  # nodes receive changes of the directory 0, 1 or 2 periods late


def shards_for(num_nodes: int) -> int:
    """Return the number of shards to choose for a swarm of that size."""
    return next(shards for shards, most in SHARDS_UP_TO.items() if num_nodes <= most)


def simulated_shards_for(num_nodes: int, num_shards: int, *, most_nodes: int) -> int:
    """Return how many of the shards to simulate so that about `most_nodes` nodes are; at least two.

    If a node's budget covers one shard, as with 100 members or more in each, shards hardly interact. A few of them,
    whose members read no others, then behave as they would among all.
    """
    return max(2, min(num_shards, most_nodes * num_shards // num_nodes))


class Role(StrEnum):
    """Kind of a participant."""

    HONEST = "honest"
    GARBAGE = "garbage"  # announces and serves invalid groups
    SILENT = "silent"  # announces, and never answers a request
    FLOOD = "flood"  # announces many groups and has none
    LEECH = "leech"  # pulls everything and confirms nothing
    SYBIL = "sybil"  # one of many identities of one host; makes far more valid groups than an honest node


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """Settings of one simulated swarm."""

    num_nodes: int
    minutes: float = 5.0
    seed: int = 0
    num_shards: int = 8
    num_simulated_shards: int = 64  # members of other shards are only counted
    warm_up_s: float = 90.0  # excluded from the result
    settle_s: float = 90.0  # groups made in the last seconds are excluded: they may still be pulled

    # generation and training
    groups_per_step: int = 12  # local ones, and as many remote ones
    group_bytes: int = 29_300  # 12 completions of 300 tokens in the exact codec
    group_tokens: int = 3_600
    step_s: float = 85.0  # median; log-normal over nodes
    step_spread: float = 0.35  # sigma of its logarithm
    max_age_s: float = 1800.0
    max_ready_groups: int = 256

    # parameters of the policies
    with_assignment: bool = True
    announcements_per_s: float = 50.0  # budget of announcements
    max_wants: int = 256
    first_wait_s: float = 10.0  # before an unconfirmed group is announced again
    max_attempts: int = 4
    pulls_in_flight: int = 4
    pull_batch: int = 16
    pull_batch_bytes: int = 4 << 20
    pull_bytes_per_s: float = 4e6  # budget of pulls
    serve_share: float = 0.5  # of the uplink, for all peers
    serve_bytes_per_s_per_peer: float = 250e3
    burst_s: float = 8.0  # of both serving budgets
    gather_s: float = 0.2  # groups announced within this time are pulled together
    tick_s: float = 5.0  # between checks of unconfirmed and missing groups
    directory_s: float = 30.0  # between directory records, and between reads of the shard's members
    record_lives_s: float = 90.0  # a departed member is listed for this time
    listing_period_s: float = 15.0  # the directory lists a new member after 1, 2 or 3 times this
    busy_s: float = 0.5  # pause of a peer that answered BUSY
    failed_s: float = 5.0  # pause of a peer that did not answer

    # the network
    loss: float = 0.05  # of announcements, for each reader
    gossip_delay_s: float = 0.3  # median from announcement to reception; log-normal
    latency_s: float = 0.04  # median from a host to the backbone; log-normal
    slow_share: float = 0.3  # of the nodes
    slow_up_bytes_per_s: tuple[float, float] = (1e6, 10e6)  # log-uniform
    fast_up_bytes_per_s: tuple[float, float] = (10e6, 100e6)
    down_by_up: float = 4.0
    dial_timeout_s: float = 5.0
    pull_timeout_s: float = 30.0
    leave_share_per_hour: float = 0.2  # as many join

    # attackers
    attackers_share: float = 0.1
    flood_per_s: float = 2.0  # announcements of a flooder
    sybil_factor: float = 5.0  # groups of a sybil relative to an honest node

    # message sizes
    announcement_bytes: int = 300  # 80, and gossipsub's sender, sequence, topic, signature and frame
    request_bytes: int = 150
    id_bytes: int = 36  # of each group in a request or confirmation
    answered_announcement_bytes: int = 90  # of each in an answer
    record_bytes: int = 300  # a member's entry in the directory
    hop_bytes: int = 600  # one step of a look-up in the table

    num_observed: int = 6  # nodes whose policy code is timed

    @property
    def end_s(self) -> float:
        return self.minutes * 60


def copies_of(num_readers: int) -> float:
    """Return how often each of so many subscribers receives a gossipsub message, measured with real `p2pd`s on
    loopback.

    1.0 among 2, 5.7 among 8, 8.5 among 16, 8.7 among 24; the bounded degree of the mesh limits it in larger swarms.
    """
    points = [(1, 0.0), (2, 1.0), (8, 5.7), (16, 8.5), (24, 8.7)]
    for (fewer, low), (more, high) in zip(points, points[1:], strict=False):
        if num_readers <= more:
            return low + (high - low) * max(0, num_readers - fewer) / (more - fewer)
    return points[-1][1]
