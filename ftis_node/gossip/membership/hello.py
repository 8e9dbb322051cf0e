"""Determines which connected peers are members of the run: those that answer the run's "hello" request.

A subscription to the run's topic does not show it. Bootstrap nodes subscribe only to forward messages, and gossipsub
does not see members behind a relay. So each newly connected peer gets one request. A peer that refuses this node gives
no answer; the pauses between the requests to it grow to a minute.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ftis_node.swarm.peer_backoff import PeerBackoff
from ftis_node.swarm.peer_guard import PeerGuard, Place

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Collection

    AskHello = Callable[[str], Awaitable[bool | None]]

MAX_HELLOS_IN_FLIGHT = 16


class MemberProbe:
    """Prober that queries the membership of each newly connected peer once, and caches the answers."""

    def __init__(
        self,
        ask: AskHello,
        *,
        guard: PeerGuard | None = None,
        first_pause_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask` returns whether a peer is a member, or None if it gave no answer.

        `first_pause_s` follows the first request without an answer; each further one doubles it, up to 64 times.
        `clock` is monotonic, in seconds.
        """
        self._ask = ask
        self._guard = guard or PeerGuard()
        self._is_member: dict[str, bool] = {}  # connected peers that answered
        self._asking: set[str] = set()
        self._clock = clock
        self._silent = PeerBackoff(first_s=first_pause_s)  # connected peers that gave no answer

    @property
    def members(self) -> list[str]:
        return [peer_id for peer_id, is_member in self._is_member.items() if is_member]

    def update(self, connected: Collection[str], group: asyncio.TaskGroup) -> None:
        """Forget disconnected peers; query new ones and paused ones that are due, in tasks of `group`."""
        for peer_id in set(self._is_member) - set(connected):
            del self._is_member[peer_id]
        self._silent.keep(connected)
        for peer_id in sorted(set(connected) - set(self._is_member) - self._asking):
            if len(self._asking) >= MAX_HELLOS_IN_FLIGHT:
                break
            if not (self._guard.may_work(peer_id) and self._silent.may_ask(peer_id, now=self._clock())):
                continue
            self._asking.add(peer_id)
            group.create_task(self._ask_one(peer_id), name=f"gossip-hello {peer_id[-6:]}")

    def recheck(self) -> None:
        """Query peers again that answered no, because a node that has just started may not serve its run yet."""
        self._is_member = dict.fromkeys(self.members, True)

    async def _ask_one(self, peer_id: str) -> None:
        is_member = None
        try:
            with self._guard.work_for(peer_id, Place.HELLO, passes=(OSError, EOFError)):
                is_member = await self._ask(peer_id)
        finally:
            self._asking.discard(peer_id)
        if is_member is None:
            self._silent.failed(peer_id, now=self._clock())
        else:
            self._silent.succeeded(peer_id)
            self._is_member[peer_id] = is_member
