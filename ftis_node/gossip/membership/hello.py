"""Which connected peers are members of the run: those that answer the run's "hello".

A subscription to the run's topic does not tell: bootstrap nodes read topics only to forward them, and gossipsub does
not see a member that is reached through a relay. So each new connection is asked once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.swarm.peer_guard import PeerGuard, Place

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Collection

    Question = Callable[[str], Awaitable[bool | None]]

MAX_QUESTIONS_IN_FLIGHT = 16


class MemberProbe:
    """What is known of the peers connected to one p2pd."""

    def __init__(self, ask: Question, *, guard: PeerGuard | None = None) -> None:
        """`ask` says whether a peer is a member, or None where that is not known yet."""
        self._ask = ask
        self._guard = guard or PeerGuard()
        self._is_member: dict[str, bool] = {}  # connected peers that have answered
        self._asking: set[str] = set()

    @property
    def members(self) -> list[str]:
        """Connected members."""
        return [peer_id for peer_id, is_member in self._is_member.items() if is_member]

    def update(self, connected: Collection[str], group: asyncio.TaskGroup) -> None:
        """Forgets who has gone; asks, in `group`, who is new or has not answered."""
        for peer_id in set(self._is_member) - set(connected):
            del self._is_member[peer_id]
        for peer_id in sorted(set(connected) - set(self._is_member) - self._asking):
            if len(self._asking) >= MAX_QUESTIONS_IN_FLIGHT:
                break
            if not self._guard.may_work(peer_id):
                continue
            self._asking.add(peer_id)
            group.create_task(self._question(peer_id), name=f"gossip-hello {peer_id[-6:]}")

    def recheck(self) -> None:
        """Has those that said no asked once more: a node that has just started may not know its run yet."""
        self._is_member = dict.fromkeys(self.members, True)

    async def _question(self, peer_id: str) -> None:
        is_member = None
        try:
            with self._guard.work_for(peer_id, Place.HELLO, passes=(OSError, EOFError)):
                is_member = await self._ask(peer_id)
        finally:
            self._asking.discard(peer_id)
        if is_member is not None:
            self._is_member[peer_id] = is_member
