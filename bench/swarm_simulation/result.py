"""One run of a simulated swarm, and its result: traffic, memory and CPU of a node, and how many groups were pulled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from swarm_simulation.announcement import AnnouncedGroup
from swarm_simulation.host_link import Kind
from swarm_simulation.node import SimulatedNode
from swarm_simulation.population import Population, honest_nodes
from swarm_simulation.settings import Role, SimulationSettings
from swarm_simulation.sizes import entry_bytes
from swarm_simulation.world import World


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of one swarm. Values of nodes are means over honest nodes that stayed, after the warm-up, unless noted."""

    num_nodes: int
    num_simulated: int  # less than `num_nodes` if only some shards were
    num_shards: int
    seed: int
    virtual_s: float
    num_groups: int  # of honest nodes, in the reported time
    pulled_share: float  # by at least one other honest node
    pulled_at_first_share: float  # after their first announcement
    pulls_per_group: float
    first_pull_s: dict[str, float]  # from publishing: p50, p90, p99
    full_steps_share: float  # steps with all remote groups
    top_share_of_cap: float  # maximum use of a buffer cap by one peer in any node
    heard_per_s: float
    shards_read: float
    received_bytes_per_s: dict[str, float]
    sent_bytes_per_s: dict[str, float]
    received_bytes_per_s_p99: float  # the busiest nodes, all kinds together
    sent_bytes_per_s_p99: float
    entries: dict[str, float]
    memory_bytes: float
    memory_bytes_max: float
    cpu_ms_per_s: float  # measured in this run, on observed nodes
    bans_share: dict[str, float]  # fraction of (honest node, attacker) pairs with a ban, by kind
    ban_after_s: float | None  # median, from the run's start

    def without_clock(self) -> SimulationResult:
        """Return the result without values that depend on the machine's speed."""
        return replace(self, cpu_ms_per_s=0.0)

    @property
    def received_in_all(self) -> float:
        """Bytes a second."""
        return sum(self.received_bytes_per_s.values())

    @property
    def sent_in_all(self) -> float:
        """Bytes a second."""
        return sum(self.sent_bytes_per_s.values())


def simulate(settings: SimulationSettings, *, progress: Callable[[float], None] = lambda _: None) -> SimulationResult:
    """Run one swarm; `progress` is called with the virtual time about every ten virtual seconds."""
    world = World(settings)
    Population(world).start()
    world.events.run_until(settings.warm_up_s)
    for node in honest_nodes(world):
        node.restart_counters()
    while world.events.now < settings.end_s:
        world.events.run_until(min(settings.end_s, world.events.now + 10.0))
        progress(world.events.now)
    return make_result(world)


def make_result(world: World) -> SimulationResult:
    """Return the result at the end of the run."""
    settings, nodes = world.settings, _stayed(world)
    seconds = settings.end_s - settings.warm_up_s
    groups = [
        group
        for group in world.groups.values()
        if group.role is Role.HONEST and settings.warm_up_s <= group.created_at <= settings.end_s - settings.settle_s
    ]
    pulled = [group for group in groups if group.pulled_at is not None]
    received = {kind: [_received(node, kind) / seconds for node in nodes] for kind in Kind}
    sent = {kind: [_sent(node, kind) / seconds for node in nodes] for kind in Kind}
    entries = [_entries(world, node) for node in nodes]
    sizes = entry_bytes()
    memory = [sum(number * sizes[kind] for kind, number in one.items()) for one in entries]
    observed = [node.policy_s for node in nodes if node.policy_s > 0]
    share, after_s = _bans(world, nodes)
    return SimulationResult(
        num_nodes=settings.num_nodes,
        num_simulated=settings.num_nodes - world.num_elsewhere,
        num_shards=settings.num_shards,
        seed=settings.seed,
        virtual_s=settings.end_s,
        num_groups=len(groups),
        pulled_share=len(pulled) / max(1, len(groups)),
        pulled_at_first_share=sum(group.attempt_pulled == 0 for group in pulled) / max(1, len(groups)),
        pulls_per_group=fmean([group.num_pulls for group in groups] or [0]),
        first_pull_s=_latencies(pulled),
        full_steps_share=sum(node.num_full_steps for node in nodes) / max(1, sum(node.num_steps for node in nodes)),
        top_share_of_cap=max(node.top_share for node in honest_nodes(world)),
        heard_per_s=fmean(node.num_announcements for node in nodes) / seconds,
        shards_read=fmean(len(node.shard_reader.shards) for node in nodes),
        received_bytes_per_s={kind.name.lower(): fmean(received[kind]) for kind in Kind},
        sent_bytes_per_s={kind.name.lower(): fmean(sent[kind]) for kind in Kind},
        received_bytes_per_s_p99=_percentile([sum(one) for one in zip(*received.values(), strict=True)], 0.99),
        sent_bytes_per_s_p99=_percentile([sum(one) for one in zip(*sent.values(), strict=True)], 0.99),
        entries={kind: fmean(one[kind] for one in entries) for kind in sizes},
        memory_bytes=fmean(memory),
        memory_bytes_max=max(memory),
        cpu_ms_per_s=1e3 * fmean(observed or [0.0]) / seconds,
        bans_share=share,
        ban_after_s=after_s,
    )


def _stayed(world: World) -> list[SimulatedNode]:
    """Return the honest nodes that were present from the start."""
    return [node for node in honest_nodes(world) if node.joined_at == 0.0]


def _received(node: SimulatedNode, kind: Kind) -> float:
    return node.announcement_bytes if kind is Kind.ANNOUNCEMENTS else node.traffic.received[kind]


def _sent(node: SimulatedNode, kind: Kind) -> float:
    return node.announcement_bytes if kind is Kind.ANNOUNCEMENTS else node.traffic.sent[kind]


def _entries(world: World, node: SimulatedNode) -> dict[str, int]:
    """Return the number of entries in each policy's state."""
    return {
        "wants": len(node.queue),
        "trackers": len(node.trackers),
        "unconfirmed": len(node.unconfirmed),
        "members": len(world.member_views[node.shard].views[node.view]),
        "reputations": len(node.peer_table.records),
        "quotas": len(node.peer_table.records),
        "budgets": node.num_budgets,
        "buffer": len(node.ready),
    }


def _latencies(pulled: Sequence[AnnouncedGroup]) -> dict[str, float]:
    seconds = [group.pulled_at - group.created_at for group in pulled if group.pulled_at is not None]
    return {f"p{percent}": _percentile(seconds, percent / 100) for percent in (50, 90, 99)}


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def _bans(world: World, nodes: Sequence[SimulatedNode]) -> tuple[dict[str, float], float | None]:
    """Return the fraction of (honest node, attacker) pairs that ended in a ban, by kind, and the median time
    until it.
    """
    roles = {peer.peer_id: peer.role for peer in world.peers.values()}
    met: Counter[str] = Counter()
    banned: Counter[str] = Counter()
    times: list[float] = []
    for node in nodes:
        for peer_id in node.peer_table.records:
            role = roles.get(peer_id, Role.HONEST)
            met[role] += 1
            if peer_id in node.peer_table.banned_at:
                banned[role] += 1
                if role is not Role.HONEST:
                    times.append(node.peer_table.banned_at[peer_id])
    return {role: banned[role] / met[role] for role in sorted(met)}, median(times) if times else None
