"""Per-peer rate limits (groups, tokens, scoring time, announcements) and shares of the replay buffer.

Each sender has its own token buckets. All new peers together share one more set, so that a thousand new identities get
no more than a few. A peer with some reputation (`Reputation.is_known`) uses only its own buckets, so new peers cannot
exhaust them.
"""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftis_node.swarm.token_bucket import TokenBucket

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MINUTE_S = 60.0
MIN_PARTS = 3  # "", "ip4", host
PREFIX_BITS = {4: 24, 6: 48}


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Groups, tokens and scoring seconds per minute, for one sender and for all new peers together."""

    groups_per_minute: float = 6000.0
    tokens_per_minute: float = 20e6
    new_peers_groups_per_minute: float = 30000.0
    new_peers_tokens_per_minute: float = 100e6
    scoring_s_per_minute: float = 20.0
    new_peers_scoring_s_per_minute: float = 40.0


class _PeerBuckets:
    """Token buckets for groups, tokens and scoring seconds; the burst is one minute."""

    def __init__(self, groups_per_minute: float, tokens_per_minute: float, scoring_s_per_minute: float) -> None:
        self.scoring_s = TokenBucket(rate_per_s=scoring_s_per_minute / MINUTE_S, burst=scoring_s_per_minute)
        self._groups = TokenBucket(rate_per_s=groups_per_minute / MINUTE_S, burst=groups_per_minute)
        self._tokens = TokenBucket(rate_per_s=tokens_per_minute / MINUTE_S, burst=tokens_per_minute)

    def is_spent(self, *, now: float) -> bool:
        return self._groups.left(now=now) < 1.0 or self._tokens.left(now=now) <= 0.0

    def spend(self, num_tokens: int, *, now: float) -> None:
        self._groups.spend(1.0, now=now)
        self._tokens.spend(num_tokens, now=now)


class Quotas:
    """Token buckets of the `max_peers` peers seen last. `now` is a monotonic clock in seconds."""

    def __init__(self, limits: QuotaLimits, *, max_peers: int = 4096) -> None:
        self._limits = limits
        self._max_peers = max_peers
        self._senders: OrderedDict[str, _PeerBuckets] = OrderedDict()
        self._new_peers = _PeerBuckets(
            limits.new_peers_groups_per_minute,
            limits.new_peers_tokens_per_minute,
            limits.new_peers_scoring_s_per_minute,
        )

    def allows(self, peer_id: str, *, is_new_peer: bool, now: float) -> bool:
        """Return whether to validate a group of this peer. Spends nothing, because the sender is not verified yet."""
        if is_new_peer and self._new_peers.is_spent(now=now):
            return False
        buckets = self._senders.get(peer_id)
        return buckets is None or not buckets.is_spent(now=now)

    def allows_scoring(self, peer_id: str, *, is_new_peer: bool, now: float) -> bool:
        """Return whether to score a group of this peer. Spends nothing."""
        if is_new_peer and self._new_peers.scoring_s.left(now=now) <= 0.0:
            return False
        buckets = self._senders.get(peer_id)
        return buckets is None or buckets.scoring_s.left(now=now) > 0.0

    def spend(self, peer_id: str, num_tokens: int, *, is_new_peer: bool, now: float) -> None:
        """Charge the peer that is responsible for a group, whatever the result of the validation."""
        if is_new_peer:
            self._new_peers.spend(num_tokens, now=now)
        self._buckets_of(peer_id).spend(num_tokens, now=now)

    def spend_scoring(self, peer_id: str, seconds: float, *, is_new_peer: bool, now: float) -> None:
        """Charge the signer of a group that was scored."""
        if is_new_peer:
            self._new_peers.scoring_s.spend(seconds, now=now)
        self._buckets_of(peer_id).scoring_s.spend(seconds, now=now)

    def _buckets_of(self, peer_id: str) -> _PeerBuckets:
        buckets = self._senders.get(peer_id)
        if buckets is None:
            limits = self._limits
            buckets = _PeerBuckets(limits.groups_per_minute, limits.tokens_per_minute, limits.scoring_s_per_minute)
            self._senders[peer_id] = buckets
            if len(self._senders) > self._max_peers:
                self._senders.popitem(last=False)
        self._senders.move_to_end(peer_id)
        return buckets


@dataclass(frozen=True, slots=True)
class ShareCap:
    """Cap on the fraction of the buffer's places for remote groups that one neighbor may occupy.

    A neighbor is a peer, or all peers of one network: `networks` maps peer ids to networks (`subnet_of`). With k
    neighbors each may hold at least 1 / k of the places, so one peer alone may hold all. With many, none holds more
    than `share`, or `trusted_share` for peers in `trusted`.
    """

    share: float = 0.25
    trusted_share: float = 0.5
    trusted: frozenset[str] = frozenset()
    networks: Mapping[str, str] = field(default_factory=dict)

    def neighbour(self, peer_id: str) -> str:
        """Return the name under which a peer's groups are counted. A trusted peer is counted separately."""
        return peer_id if peer_id in self.trusted else self.networks.get(peer_id, peer_id)

    def places(self, neighbour: str, *, num_neighbours: int, capacity: int) -> int:
        """Return the number of places of one neighbor, at least one."""
        share = self.trusted_share if neighbour in self.trusted else self.share
        return max(1, math.floor(capacity * min(1.0, max(share, 1.0 / max(1, num_neighbours)))))


class AnnounceRateLimiter:
    """Token bucket for each of the `max_peers` peers seen last; the burst is one minute."""

    def __init__(self, *, max_per_minute: float, max_peers: int = 4096) -> None:
        self._max_per_minute = max_per_minute
        self._max_peers = max_peers
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def admits(self, peer_id: str, *, now: float) -> bool:
        """Return whether to handle one more announcement of the peer, and charge it. `now`: seconds, monotonic."""
        bucket = self._buckets.pop(peer_id, None) or TokenBucket(
            rate_per_s=self._max_per_minute / MINUTE_S, burst=self._max_per_minute
        )
        self._buckets[peer_id] = bucket
        if len(self._buckets) > self._max_peers:
            self._buckets.popitem(last=False)
        return bucket.take(1.0, now=now)


def subnet_of(multiaddrs: Iterable[str]) -> str | None:
    """Return the subnet of a peer with these addresses: public IPv4 /24 or IPv6 /48; the first public address counts.

    Identities cost nothing, but addresses in many networks do. Return None for loopback, private and relayed addresses,
    because they do not identify the peer's network.
    """
    return next(filter(None, map(_subnet, multiaddrs)), None)


def _subnet(multiaddr: str) -> str | None:
    parts = multiaddr.split("/")
    if len(parts) < MIN_PARTS or parts[1] not in ("ip4", "ip6") or "p2p-circuit" in parts:
        return None
    try:
        address = ipaddress.ip_address(parts[2])
    except ValueError:
        return None
    if not address.is_global:
        return None
    return str(ipaddress.ip_network((address, PREFIX_BITS[address.version]), strict=False))
