"""Token buckets for any unit, slots of requests by peer, quotas of senders, and shares of the replay buffer.

All new peers together share one more set of quotas, so that a thousand new identities get no more than a few. A peer
with some reputation (`Reputation.is_known`) uses only its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ftis_node.records.addresses import block_of
from ftis_node.swarm.lru import LruDict

MAX_WAIT_S = 2.0  # for one item; a longer wait is answered with BUSY
RECENT_S = 10.0  # time constant of the decay
DECAY_PERIOD_S = 0.5
SHARE_FACTOR = 1.5  # tolerance above the mean
MAX_REMEMBERED = 4096  # buckets; the least recently used is dropped
MINUTE_S = 60.0


class PeerSlots:
    """Concurrency limiter. Kinds of peers, such as slow ones, have separate slots, so they delay only one another."""

    def __init__(self) -> None:
        self._held = Counter[tuple[str, str]]()  # slots by peer and kind; at most a few dozen

    def __contains__(self, peer_id: str) -> bool:
        return self.num_held(peer_id) > 0

    def num_held(self, peer_id: str | None = None, *, kind: str | None = None) -> int:
        """Return the number of slots that are held: by one peer or all, of one kind or all."""
        held = self._held.items()
        return sum(num for (peer, of_kind), num in held if peer_id in (None, peer) and kind in (None, of_kind))

    def has_free(self, peer_id: str, kind: str, most: int, per_peer: int = 1) -> bool:
        """Return whether fewer than `most` slots of this kind are held, and fewer than `per_peer` by this peer."""
        return self.num_held(kind=kind) < most and self.num_held(peer_id) < per_peer

    def take(self, peer_id: str, kind: str, most: int, per_peer: int = 1) -> bool:
        is_free = self.has_free(peer_id, kind, most, per_peer)
        if is_free:
            self._held[peer_id, kind] += 1
        return is_free

    def release(self, peer_id: str, kind: str | None = None) -> None:
        """Release a slot of the kind with which it was taken: a peer may change its kind. None: it has only one."""
        key = next(key for key in self._held if key[0] == peer_id and kind in (None, key[1]))
        self._held -= Counter([key])  # subtraction drops entries of 0


class UploadBudget:
    """Token buckets for requests of each peer and service, and for bytes to all peers. `now` is monotonic, in seconds.

    While bandwidth is short, a peer that recently received more than its share is refused first. The share is the mean
    over the peers that received anything.
    """

    def __init__(self, *, max_bytes_per_s: float, max_requests_per_minute: float) -> None:
        """`max_requests_per_minute` is the rate and the burst for each service of each peer."""
        self._line = TokenBucket(rate_per_s=max_bytes_per_s, burst=max_bytes_per_s)
        self._requests = minute_buckets(max_requests_per_minute)
        self._recent: dict[str, float] = {}  # bytes sent to each peer, with exponential decay
        self._decayed_at = 0.0

    def takes_request(self, peer_id: str, service: str, *, cost: float = 1.0, now: float) -> bool:
        """Return whether to serve a request, and charge it. `cost` is in units of a usual request."""
        return self._requests.of(f"{peer_id} {service}").take(cost, now=now)

    def wait_s(self, peer_id: str, num_bytes: int, *, now: float) -> float | None:
        """Return the seconds to wait before sending `num_bytes`, and charge them; None if the peer must ask another.

        An item larger than one second's rate is sent when the budget is full.
        """
        self._decay(now)
        left = self._line.left(now=now)
        debt_s = self._line.wait_s(num_bytes, now=now)
        is_full = left < num_bytes
        if debt_s > MAX_WAIT_S or (is_full and self._is_above_share(peer_id)):
            return None
        self._line.spend(num_bytes, now=now)
        self._recent[peer_id] = self._recent.get(peer_id, 0.0) + num_bytes
        return debt_s

    def _is_above_share(self, peer_id: str) -> bool:
        share = sum(self._recent.values()) / len(self._recent) if self._recent else math.inf
        return self._recent.get(peer_id, 0.0) > SHARE_FACTOR * share

    def _decay(self, now: float) -> None:
        """Apply the decay and drop peers below one byte; at most every 0.5 s, because there may be thousands."""
        if now < self._decayed_at + DECAY_PERIOD_S:
            return
        left = math.exp((self._decayed_at - now) / RECENT_S)
        self._recent = {peer: sent * left for peer, sent in self._recent.items() if sent * left >= 1}
        self._decayed_at = now


class TokenBucket:
    """Token bucket: starts full and refills at a steady rate. `now` is a monotonic clock in seconds."""

    __slots__ = ("_burst", "_counted_at", "_left", "_rate_per_s")  # a node holds several for each peer

    def __init__(self, *, rate_per_s: float, burst: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._left = burst
        self._counted_at: float | None = None

    def left(self, *, now: float) -> float:
        """Return the amount available now; negative if more was spent than was available."""
        if self._counted_at is not None:
            self._left = min(self._burst, self._left + (now - self._counted_at) * self._rate_per_s)
        self._counted_at = now
        return self._left

    def take(self, amount: float, *, now: float) -> bool:
        if self.left(now=now) < amount:
            return False
        self._left -= amount
        return True

    def spend(self, amount: float, *, now: float) -> float:
        """Spend `amount` even if it is not available; return the seconds until the debt is repaid (0: no debt)."""
        self._left = self.left(now=now) - amount
        return max(0.0, -self._left / self._rate_per_s)

    def charge(self, amount: float, *, now: float) -> None:
        """Spend `amount`; the debt is at most one burst, so that it is soon repaid whatever the amount."""
        self._left = max(self.left(now=now) - amount, -self._burst)

    def wait_s(self, amount: float, *, now: float) -> float:
        """Return the seconds until `amount` is available; an amount above the burst waits for a full bucket."""
        return max(0.0, (min(amount, self._burst) - self.left(now=now)) / self._rate_per_s)


class TokenBuckets:
    """A token bucket for each of the `capacity` keys used last; the others count as full."""

    def __init__(self, *, rate_per_s: float, burst: float, capacity: int = MAX_REMEMBERED) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._buckets = LruDict[str, TokenBucket](capacity)

    def peek(self, key: str) -> TokenBucket:
        """Return the bucket of a key for a query. It is not remembered, because the key may be unverified."""
        return self._buckets.get(key) or TokenBucket(rate_per_s=self._rate_per_s, burst=self._burst)

    def of(self, key: str) -> TokenBucket:
        bucket = self._buckets[key] = self.peek(key)
        return bucket


def minute_buckets(per_minute: float, *, capacity: int = MAX_REMEMBERED) -> TokenBuckets:
    return TokenBuckets(rate_per_s=per_minute / MINUTE_S, burst=per_minute, capacity=capacity)


# Of one sender: a hundred times what a fast GPU makes. New peers share one limit, because identities cost nothing.
GROUPS_PER_MINUTE, NEW_PEERS_GROUPS_PER_MINUTE = 6000.0, 30000.0
TOKENS_PER_MINUTE, NEW_PEERS_TOKENS_PER_MINUTE = 20e6, 100e6
SCORING_S_PER_MINUTE, NEW_PEERS_SCORING_S_PER_MINUTE = 20.0, 40.0  # a separate process scores groups of new peers
KNOWN_PEERS_SCORING_S_PER_MINUTE = 40.0  # the others of the 60 s are for own groups, which the same process scores


def known_peers_scoring_s() -> TokenBucket:
    """Return a bucket of the seconds of scoring that all known peers together may use."""
    return TokenBucket(rate_per_s=KNOWN_PEERS_SCORING_S_PER_MINUTE / MINUTE_S, burst=KNOWN_PEERS_SCORING_S_PER_MINUTE)


class Quota:
    """Token buckets of one unit: one for each sender, and one that all new peers share. A debt ends within a minute."""

    def __init__(self, per_minute: float, *, of_new_peers: float, max_peers: int = MAX_REMEMBERED) -> None:
        self._senders = minute_buckets(per_minute, capacity=max_peers)
        self._new_peers = TokenBucket(rate_per_s=of_new_peers / MINUTE_S, burst=of_new_peers)

    def left(self, peer_id: str, *, is_new_peer: bool, now: float) -> float:
        """Return the amount available to a peer. Spends nothing, because the sender may not be verified yet."""
        left = self._senders.peek(peer_id).left(now=now)
        return min(left, self._new_peers.left(now=now)) if is_new_peer else left

    def spend(self, peer_id: str, amount: float, *, is_new_peer: bool, now: float) -> None:
        if is_new_peer:
            self._new_peers.charge(amount, now=now)
        self._senders.of(peer_id).charge(amount, now=now)


class Quotas:
    """Quotas of groups, tokens and seconds of scoring. `now` is a monotonic clock in seconds."""

    def __init__(self, *, max_peers: int = MAX_REMEMBERED) -> None:
        self.scoring_s = Quota(SCORING_S_PER_MINUTE, of_new_peers=NEW_PEERS_SCORING_S_PER_MINUTE, max_peers=max_peers)
        self._groups = Quota(GROUPS_PER_MINUTE, of_new_peers=NEW_PEERS_GROUPS_PER_MINUTE, max_peers=max_peers)
        self._tokens = Quota(TOKENS_PER_MINUTE, of_new_peers=NEW_PEERS_TOKENS_PER_MINUTE, max_peers=max_peers)

    def allows(self, peer_id: str, *, is_new_peer: bool, now: float) -> bool:
        """Return whether to validate a group of this peer. Spends nothing."""
        has_groups = self._groups.left(peer_id, is_new_peer=is_new_peer, now=now) >= 1.0
        return has_groups and self._tokens.left(peer_id, is_new_peer=is_new_peer, now=now) > 0.0

    def spend(self, peer_id: str, num_tokens: int, *, is_new_peer: bool, now: float) -> None:
        """Charge the peer that is responsible for a group, whatever the result of the validation."""
        self._groups.spend(peer_id, 1.0, is_new_peer=is_new_peer, now=now)
        self._tokens.spend(peer_id, num_tokens, is_new_peer=is_new_peer, now=now)


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

    def neighbor(self, peer_id: str) -> str:
        """Return the name under which a peer's groups are counted. A trusted peer is counted separately."""
        return peer_id if peer_id in self.trusted else self.networks.get(peer_id, peer_id)

    def places(self, neighbor: str, *, num_neighbors: int, capacity: int) -> int:
        """Return the number of places of one neighbor, at least one."""
        share = self.trusted_share if neighbor in self.trusted else self.share
        return max(1, math.floor(capacity * min(1.0, max(share, 1.0 / max(1, num_neighbors)))))


def subnet_of(multiaddrs: Iterable[str]) -> str | None:
    """Return the subnet of a peer with these addresses: public IPv4 /24 or IPv6 /48; the first public address counts.

    Identities cost nothing, but addresses in many networks do. Return None for loopback, private and relayed addresses,
    because they do not identify the peer's network.
    """
    direct = (one for one in multiaddrs if one.startswith(("/ip4/", "/ip6/")) and "/p2p-circuit" not in one)
    return next((block.name for block in map(block_of, direct) if block is not None and block.is_public), None)
