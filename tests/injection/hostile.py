"""A member that does, again and again, whatever a member can do to a node."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftis_node.gossip.directory.entries import EntryKind, pack_member, sign_entry
from ftis_node.gossip.wire_format import bucket_key
from ftis_node.records.envelope import Announcement, PeerRecord, open_announcement, seal_peer_record
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import BackfillRequest
from ftis_node.swarm.topology import bucket_of
from tests.attacks.member import Member, change_completion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ftis_node.records.envelope import Accepted
    from tests.injection.full_node import FullNode
    from tests.injection.injector import Injector


HOSTILE_PERIOD_S = 0.15
ACTION_S = 2.0
EMPTY_EVERY = 4  # requests of which one is answered with nothing


class Hostile:
    """A member that does, again and again, whatever a member can do; `ghost` is an identity that is nowhere."""

    def __init__(self, member: Member, node: FullNode, injector: Injector) -> None:
        self.member, self.node, self.injector = member, node, injector
        self.ghost = Identity.generate()
        self.drawn: Accepted | None = None
        self.heard: list[bytes] = []  # ids of the node's own groups
        self.stored: list[tuple[bytes, bytes]] = []
        self._num_requests = 0
        member.gossip.serve(self._lookup, answer=member._answer)
        self.injector.marks |= {member.peer_id, member.identity.peer, self.ghost.peer_id, self.ghost.peer}

    @property
    def peer_ids(self) -> set[str]:
        return {self.member.peer_id, self.ghost.peer_id}

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            for action in self._actions():
                tasks.create_task(self._repeat(action))

    async def _lookup(self, ids: Sequence[bytes]) -> list[bytes]:
        """Give every so often nothing: a pull of what it announced fails."""
        self._num_requests += 1
        return await self.member._lookup(ids) if self._num_requests % EMPTY_EVERY else []

    def _actions(self) -> list[Callable[[], Awaitable[object]]]:
        return [
            self._send_group,
            self._send_refused,
            self._send_audited,
            self._ask,
            self._fetch,
            self._publish,
            self._register,
            self._rejoin,
            self._say_again,
            self._draw,
        ]

    async def _repeat(self, action: Callable[[], Awaitable[object]]) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ACTION_S):
                    await action()
            await asyncio.sleep(HOSTILE_PERIOD_S)

    async def _listen(self) -> None:
        async for message in self.member.gossip.announcements():
            if message.sender == self.member.victim_id:
                self.heard = [*self.heard, open_announcement(message.payload).id][-4:]

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

    async def _send_refused(self) -> None:
        """A wrong reward, an announcement that is none, and one that is too large."""
        group = self.member.group(num_tokens=4)
        await self.member.gossip.announce(self._claim(change_completion(group, 0, reward=0.5)))
        await self.member.gossip.announce(b"\xff" + self.member.identity.peer)

    async def _send_audited(self) -> None:
        """Log-probs that the learner can compare."""
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
        if ids := self.heard[-2:]:
            await self.member.gossip.fetch(self.member.victim_id, ids)
            await self.member.gossip.fetch(self.member.victim_id, ids, as_text=True)
            await self.member.gossip.confirm(self.member.victim_id, ids)

    async def _publish(self) -> None:
        maker = self.member.maker
        record = PeerRecord(
            run_id=maker.manifest.run_id,
            peer_id=self.member.peer_id,
            name="hostile",
            model="m",
            parameters=1,
            tokenizer=maker.tokenizer.fingerprint,
            role="full",
            last_number=self.member.number + 3,
            policy_version=1,
            tokens_per_s=1.0,
            created_at=time.time(),
            software="0",
            read_shards=frozenset({0}),
            domain=maker.manifest.task,
        )
        await self.member.gossip.publish_record(seal_peer_record(record, self.member.identity), ttl_s=60)

    async def _register(self) -> None:
        """The ghost, with an address where nobody is."""
        run_id, expires_at = self.member.maker.manifest.run_id, time.time() + 60
        payload = pack_member([f"/ip4/127.0.0.1/tcp/9/p2p/{self.ghost.peer_id}"], num_shards=1)
        entry = sign_entry(self.ghost, EntryKind.MEMBER, run_id, payload, expires_at=expires_at)
        key = bucket_key(run_id, bucket_of(self.ghost.peer_id))
        await self.member.link.directory._node.store(key, entry, expires_at, subkey=self.ghost.peer_id)

    async def _rejoin(self) -> None:
        """The node takes it for new: greets it and asks it for what was missed."""
        self.node.parts.gossip._membership._probe._is_member.pop(self.member.peer_id, None)  # type: ignore[attr-defined]
        self.node.pull.backfill._caught_up.clear()
        self.node.directory._members = self.node.directory._members - {self.member.peer_id}

    async def _draw(self) -> None:
        """Its newest group is drawn for the audit, and for the measurement, as one by the node's weights would be."""
        audit, intake = self.node.audit, self.node.pull.intake
        if intake.on_foreign == audit.offer:
            intake.on_foreign = self._note_foreign
        if self.drawn is not None and audit._waiting.empty():
            audit._waiting.put_nowait(self.drawn)
        if self.drawn is not None and intake._newest_own.empty():
            intake._newest_own.put_nowait(self.drawn)

    def _note_foreign(self, accepted: Accepted) -> None:
        if accepted.group.sender == self.member.peer_id:
            self.drawn = accepted
        self.node.audit.offer(accepted)

    async def _say_again(self) -> None:
        """What the node has, as one that was never told so."""
        if self.stored:
            _, claim = self.stored[0]
            again: Announcement = replace(open_announcement(claim), attempt=1)
            await self.member.gossip.announce(again.to_bytes())
