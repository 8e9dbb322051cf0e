"""Optional measurements in a directory record: step, rates, evaluations, senders of the groups used."""

from __future__ import annotations

from dataclasses import dataclass

from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import MAX_GROUP_SOURCES, MAX_GROUPS_PER_MINUTE, MAX_PASS_RATES
from ftis_node.records.identity import peer_id_from_text, peer_id_text


@dataclass(frozen=True, slots=True)
class PeerStats:
    """Claims of a peer about its progress, for display only: no decision depends on them.

    `pass_rates` are pairs of a step and pass@1 in [0, 1], the oldest first. `sources` are pairs of a peer id and the
    number of its groups among the `trained_groups` of the last steps, the largest number first.
    """

    step: int = 0
    groups_per_minute: float = 0.0
    rejected_groups: int = 0
    pass_rates: tuple[tuple[int, float], ...] = ()
    sources: tuple[tuple[str, int], ...] = ()
    trained_groups: int = 0


def pack_stats(stats: PeerStats) -> pb.PeerStats:
    """Return the message, within the bounds that readers require."""
    return pb.PeerStats(
        step=stats.step,
        groups_per_minute=min(max(stats.groups_per_minute, 0.0), MAX_GROUPS_PER_MINUTE),
        rejected_groups=stats.rejected_groups,
        pass_rates=[pb.PassRate(step=step, pass_at_1=rate) for step, rate in stats.pass_rates[-MAX_PASS_RATES:]],
        sources=[
            pb.GroupSource(peer=peer_id_from_text(peer_id), groups=groups)
            for peer_id, groups in stats.sources[:MAX_GROUP_SOURCES]
        ],
        trained_groups=stats.trained_groups,
    )


def unpack_stats(message: pb.PeerStats) -> PeerStats:
    """Return the measurements in a message whose bounds were checked."""
    return PeerStats(
        step=message.step,
        groups_per_minute=message.groups_per_minute,
        rejected_groups=message.rejected_groups,
        pass_rates=tuple((one.step, one.pass_at_1) for one in message.pass_rates),
        sources=tuple((peer_id_text(one.peer), one.groups) for one in message.sources),
        trained_groups=message.trained_groups,
    )
