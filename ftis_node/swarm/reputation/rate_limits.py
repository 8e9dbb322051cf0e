"""How much of this node's attention one peer may have: groups and tokens a minute, and places in the buffer.

Each sender has an allowance of its own; all strangers have one more together, so that a thousand new identities have
no more than a few. A peer that has shown something (`Reputation.is_known`) draws on its own alone, so that strangers
cannot take its turn away.
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
    """Groups, tokens and seconds of scoring a minute: of one sender, and of all strangers together."""

    groups_a_minute: float = 6000.0
    tokens_a_minute: float = 20e6
    strangers_groups_a_minute: float = 30000.0
    strangers_tokens_a_minute: float = 100e6
    scoring_s_a_minute: float = 20.0
    strangers_scoring_s_a_minute: float = 40.0


class _Shares:
    """Groups, tokens and seconds of scoring, a minute's worth at once at most."""

    def __init__(self, groups_a_minute: float, tokens_a_minute: float, scoring_s_a_minute: float) -> None:
        self.scoring_s = TokenBucket(rate_per_s=scoring_s_a_minute / MINUTE_S, burst=scoring_s_a_minute)
        self._groups = TokenBucket(rate_per_s=groups_a_minute / MINUTE_S, burst=groups_a_minute)
        self._tokens = TokenBucket(rate_per_s=tokens_a_minute / MINUTE_S, burst=tokens_a_minute)

    def is_spent(self, *, now: float) -> bool:
        return self._groups.left(now=now) < 1.0 or self._tokens.left(now=now) <= 0.0

    def spend(self, num_tokens: int, *, now: float) -> None:
        self._groups.spend(1.0, now=now)
        self._tokens.spend(num_tokens, now=now)


class Quotas:
    """The allowances of the peers seen last; `max_peers` bounds them. `now` is a clock that never goes back, in s."""

    def __init__(self, limits: QuotaLimits, *, max_peers: int = 4096) -> None:
        self._limits = limits
        self._max_peers = max_peers
        self._senders: OrderedDict[str, _Shares] = OrderedDict()
        self._strangers = _Shares(
            limits.strangers_groups_a_minute, limits.strangers_tokens_a_minute, limits.strangers_scoring_s_a_minute
        )

    def allows(self, peer_id: str, *, is_stranger: bool, now: float) -> bool:
        """Whether a group of this peer is looked at. Spends nothing: a name on a group is nobody's word yet."""
        if is_stranger and self._strangers.is_spent(now=now):
            return False
        shares = self._senders.get(peer_id)
        return shares is None or not shares.is_spent(now=now)

    def allows_scoring(self, peer_id: str, *, is_stranger: bool, now: float) -> bool:
        """Whether a group of this peer is scored. Spends nothing."""
        if is_stranger and self._strangers.scoring_s.left(now=now) <= 0.0:
            return False
        shares = self._senders.get(peer_id)
        return shares is None or shares.scoring_s.left(now=now) > 0.0

    def spend(self, peer_id: str, num_tokens: int, *, is_stranger: bool, now: float) -> None:
        """Charges the peer that answers for a group, whatever the verdict was."""
        if is_stranger:
            self._strangers.spend(num_tokens, now=now)
        self._shares_of(peer_id).spend(num_tokens, now=now)

    def spend_scoring(self, peer_id: str, seconds: float, *, is_stranger: bool, now: float) -> None:
        """Charges the signer of a group that was scored."""
        if is_stranger:
            self._strangers.scoring_s.spend(seconds, now=now)
        self._shares_of(peer_id).scoring_s.spend(seconds, now=now)

    def _shares_of(self, peer_id: str) -> _Shares:
        shares = self._senders.get(peer_id)
        if shares is None:
            limits = self._limits
            shares = _Shares(limits.groups_a_minute, limits.tokens_a_minute, limits.scoring_s_a_minute)
            self._senders[peer_id] = shares
            if len(self._senders) > self._max_peers:
                self._senders.popitem(last=False)
        self._senders.move_to_end(peer_id)
        return shares


@dataclass(frozen=True, slots=True)
class ShareCap:
    """How many of the buffer's places for foreign groups one neighbour's may hold.

    A neighbour is a peer, or all peers of one network: `networks` names those by peer id (`neighbourhood_of`).
    Among k neighbours each may hold at least 1 / k of the places, so the one peer of a swarm of two may hold all; where
    there are many, none holds more than `share`, or `trusted_share` of those in `trusted`.
    """

    share: float = 0.25
    trusted_share: float = 0.5
    trusted: frozenset[str] = frozenset()
    networks: Mapping[str, str] = field(default_factory=dict)

    def neighbour(self, peer_id: str) -> str:
        """Under which name a peer's groups are counted; a trusted peer's for itself."""
        return peer_id if peer_id in self.trusted else self.networks.get(peer_id, peer_id)

    def places(self, neighbour: str, *, num_neighbours: int, capacity: int) -> int:
        """At least one."""
        share = self.trusted_share if neighbour in self.trusted else self.share
        return max(1, math.floor(capacity * min(1.0, max(share, 1.0 / max(1, num_neighbours)))))


class AnnounceRateLimiter:
    """An allowance for each of the peers heard last; a minute's worth may be said at once."""

    def __init__(self, *, max_per_minute: float, max_peers: int = 4096) -> None:
        self._max_per_minute = max_per_minute
        self._max_peers = max_peers
        self._heard: OrderedDict[str, TokenBucket] = OrderedDict()

    def admits(self, peer_id: str, *, now: float) -> bool:
        """Whether one more announcement of the peer is heard; it is charged for it. `now`: a clock in seconds."""
        allowance = self._heard.pop(peer_id, None) or TokenBucket(
            rate_per_s=self._max_per_minute / MINUTE_S, burst=self._max_per_minute
        )
        self._heard[peer_id] = allowance
        if len(self._heard) > self._max_peers:
            self._heard.popitem(last=False)
        return allowance.take(1.0, now=now)


def subnet_of(multiaddrs: Iterable[str]) -> str | None:
    """The neighbourhood of a peer that is connected by these addresses; the first public one counts."""
    return next(filter(None, map(_prefix_of, multiaddrs)), None)


def _prefix_of(multiaddr: str) -> str | None:
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
