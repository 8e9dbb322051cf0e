"""Admission control for incoming requests: rejects banned peers, limits streams and budgets of others."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from ftis_node.errors import RecordError
from ftis_node.gossip.wire_names import RpcService
from ftis_node.swarm.token_bucket import UploadBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.gossip.interface import GossipLimits

# In units of usual requests. Honest peers send these rarely, and a query costs several look-ups.
COSTS = {RpcService.HELLO: 10.0, RpcService.BATCHES: 10.0, RpcService.ASK: 10.0}


class OverBudget(RecordError):
    """A request exceeds a limit; `reason` names the limit."""


class StreamSlots:
    """Counters of concurrent streams, in total and for each peer."""

    def __init__(self, *, max_total: int, max_per_peer: int) -> None:
        self._max_total = max_total
        self._max_per_peer = max_per_peer
        self._taken: Counter[str] = Counter()

    def take(self, peer_id: str) -> bool:
        """Take a slot for a peer; return whether one was free."""
        if self._taken.total() >= self._max_total or self._taken[peer_id] >= self._max_per_peer:
            return False
        self._taken[peer_id] += 1
        return True

    def give_back(self, peer_id: str) -> None:
        self._taken[peer_id] -= 1
        if not self._taken[peer_id]:
            del self._taken[peer_id]


class AdmissionControl:
    """Admission control shared by all streams of a node. Outlives p2pd sessions, so a restart resets no budget."""

    def __init__(self, limits: GossipLimits) -> None:
        self._slots = StreamSlots(max_total=limits.max_streams, max_per_peer=limits.max_streams_per_peer)
        self._budget = UploadBudget(
            max_bytes_per_s=limits.max_upload_bytes_per_s, max_requests_per_minute=limits.max_requests_per_minute
        )
        self.is_refused: Callable[[str], bool] = _admit_all

    def enter(self, peer_id: str, service: RpcService) -> None:
        """Take a slot, which `leave` gives back. Raises OverBudget if the peer must retry later."""
        if not self._budget.takes_request(peer_id, service, cost=COSTS.get(service, 1.0), now=_now()):
            raise OverBudget("over_requests", f"too many requests from {peer_id} for {service}")
        if not self._slots.take(peer_id):
            raise OverBudget("busy", "all stream slots are taken")

    def leave(self, peer_id: str) -> None:
        self._slots.give_back(peer_id)

    async def before_item(self, peer_id: str, num_bytes: int) -> None:
        """Wait until an item may be sent. Raises OverBudget if that would take long."""
        wait_s = self._budget.wait_s(peer_id, num_bytes, now=_now())
        if wait_s is None:
            raise OverBudget("over_bytes", f"upload budget exceeded by {num_bytes} bytes for {peer_id}")
        if wait_s > 0:
            await asyncio.sleep(wait_s)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _admit_all(peer_id: str) -> bool:
    return False
