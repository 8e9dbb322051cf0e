"""A hostile member that repeats all actions of a member."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ftis_node.records.envelope import Accepted, Announcement, open_announcement
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import BackfillRequest
from tests.attacks.member import Member, change_completion
from tests.attacks.messages import record
from tests.injection.full_node import FullNode
from tests.injection.injector import Injector

HOSTILE_PERIOD_S = 0.15
ACTION_S = 2.0
EMPTY_EVERY = 4  # one of so many requests gets an empty answer


class Hostile:
    """A member that repeats all actions of a member. `ghost` is an identity without a host."""

    def __init__(self, member: Member, node: FullNode, injector: Injector) -> None:
        self.member, self.node, self.injector = member, node, injector
        self.ghost = Identity.generate()
        self.sampled: Accepted | None = None
        self.announced_ids: list[bytes] = []  # ids of the node's own groups
        self.stored: list[tuple[bytes, bytes]] = []
        self._num_requests = 0
        member.gossip.serve(self._lookup, answer=member._answer)
        self.injector.marks |= {member.peer_id, member.identity.peer, self.ghost.peer_id, self.ghost.peer}

    @property
    def peer_ids(self) -> set[str]:
        return {self.member.peer_id, self.ghost.peer_id}

    async def run(self) -> None:
        """Act until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            for action in (
                *(self._send_group, self._send_invalid, self._send_audited, self._ask, self._fetch, self._publish),
                *(self._register, self._rejoin, self._announce_again, self._sample_for_audit),
            ):
                tasks.create_task(self._repeat(action))

    async def _lookup(self, ids: Sequence[bytes]) -> list[bytes]:
        """Return the bodies, or sometimes none, so that a pull fails."""
        self._num_requests += 1
        return await self.member._lookup(ids) if self._num_requests % EMPTY_EVERY else []

    async def _repeat(self, action: Callable[[], Awaitable[object]]) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ACTION_S):
                    await action()
            await asyncio.sleep(HOSTILE_PERIOD_S)

    async def _listen(self) -> None:
        async for message in self.member.gossip.announcements():
            if message.sender == self.member.victim_id:
                self.announced_ids = [*self.announced_ids, open_announcement(message.payload).id][-4:]

    def _claim(self, group: Any, **changes: Any) -> bytes:
        envelope = self.member.envelope(group)
        self.injector.marks.add(envelope.id)
        claim = self.member.claim(envelope.id, envelope.to_bytes(), number=group.number, **changes)
        self.stored = [*self.stored, (envelope.id, claim)][-8:]
        return claim

    async def _send_group(self) -> None:
        claim = self._claim(self.member.group(num_tokens=4))
        self.member.answers = lambda: [claim]
        await self.member.gossip.announce(claim)

    async def _send_invalid(self) -> None:
        """Announce a group with a wrong reward, and bytes that are no announcement."""
        group = self.member.group(num_tokens=4)
        await self.member.gossip.announce(self._claim(change_completion(group, 0, reward=0.5)))
        await self.member.gossip.announce(b"\xff" + self.member.identity.peer)

    async def _send_audited(self) -> None:
        """Announce a group with claimed weights of the node, which the audit compares."""
        version, node_id = self.node.parts.context.state.policy_version, self.member.victim_id
        group = self.member.group(num_tokens=4)
        completions = tuple(
            replace(one, policy_version=version, policy_version_newest=version) for one in group.completions
        )
        await self.member.gossip.announce(self._claim(replace(group.with_completions(completions), weights_of=node_id)))

    async def _ask(self) -> None:
        question = BackfillRequest(sender=self.member.peer_id, since=time.time() - 60).to_bytes()
        await self.member.gossip.request_backfill(self.member.victim_id, question)
        await self.member.gossip.request_backfill(self.member.victim_id, b"\xff\xff")
        await self.member.gossip.request_weights(self.member.victim_id, b"\xff\xff", max_items=1)

    async def _fetch(self) -> None:
        if self.stored:
            await self.member.gossip.fetch(self.member.victim_id, [group_id for group_id, _ in self.stored])
        if ids := self.announced_ids[-2:]:
            await self.member.gossip.fetch(self.member.victim_id, ids)
            await self.member.gossip.fetch(self.member.victim_id, ids, as_text=True)
            await self.member.gossip.confirm(self.member.victim_id, ids)

    async def _publish(self) -> None:
        data = record(self.member, last_number=self.member.number + 3, policy_version=1, tokens_per_s=1.0)
        await self.member.gossip.publish_record(data, ttl_s=60)

    async def _register(self) -> None:
        """Register the ghost with an unused address."""
        await self.member.register([["/ip4/127.0.0.1/tcp/9"]], ttl_s=60, identities=[self.ghost])

    async def _rejoin(self) -> None:
        """Make the node treat this member as new, so that it sends a hello and requests missing groups."""
        self.node.parts.gossip._membership._probe._is_member.pop(self.member.peer_id, None)  # type: ignore[attr-defined]
        self.node.pull.backfill._caught_up.clear()
        self.node.directory._members = self.node.directory._members - {self.member.peer_id}

    async def _sample_for_audit(self) -> None:
        """Queue the newest group for the audit and for the measurement of the mismatch."""
        audit, intake = self.node.audit, self.node.pull.intake
        if intake.on_foreign == audit.offer:
            intake.on_foreign = self._note_foreign
        if self.sampled is not None and audit._waiting.empty():
            audit._waiting.put_nowait(self.sampled)
        if self.sampled is not None and intake._newest_own.empty():
            intake._newest_own.put_nowait(self.sampled)

    def _note_foreign(self, accepted: Accepted) -> None:
        if accepted.group.sender == self.member.peer_id:
            self.sampled = accepted
        self.node.audit.offer(accepted)

    async def _announce_again(self) -> None:
        """Announce a group again that the node already has, as if it had not acknowledged it."""
        if self.stored:
            _, claim = self.stored[0]
            again: Announcement = replace(open_announcement(claim), attempt=1)
            await self.member.gossip.announce(again.to_bytes())
