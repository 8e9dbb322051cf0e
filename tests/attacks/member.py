"""A member of the victim's run that does as a test says: hostile ones, and the honest one that goes on beside them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ftis_node.gossip import GossipLimits
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.gossip.p2pd import session
from ftis_node.gossip.p2pd.hivemind_bindings import p2pd_pb2, read_pbmsg_safe
from ftis_node.gossip.streams import close_server
from ftis_node.gossip.wire_format import protocol, service_of
from ftis_node.records.envelope import Announcement, Envelope, seal_group
from ftis_node.records.group import Group
from ftis_node.records.identity import ENVELOPE_DOMAIN, Identity
from tests.attacks.victim import patiently
from tests.gossip.helpers import settings
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from bench.stubs.group_maker import GroupMaker
    from ftis_node.gossip.wire_format import RpcService
    from tests.attacks.victim import Victim

AGAIN_S = 0.4  # between announcements of the same: gossipsub loses what is said before its mesh has grown
HONEST_PERIOD_S = 0.5
STARTING = asyncio.Lock()
NUM_KEPT = 1000  # groups of an honest member
UNUSED = 10**9  # running numbers that no group here has
LIMITS = GossipLimits(max_body_bytes=4 << 20, max_queued_announcements=64)


def spoil(group: Group, position: int = 1, **changes: Any) -> Group:
    """The group with one completion changed."""
    completions = list(group.completions)
    completions[position] = replace(completions[position], **changes)
    return group.with_completions(completions)


def sign_body(body: bytes, identity: Identity) -> Envelope:
    """Any body under an identity's signature."""
    return Envelope(hashlib.sha256(body).digest(), body, identity.sign(ENVELOPE_DOMAIN, body))


class Member:
    """One peer with its own p2pd, in the test's own process. What it holds, answers and says is the test's."""

    def __init__(
        self, gossip: Libp2pGossip, identity: Identity, maker: GroupMaker, victim: Victim, victim_id: str
    ) -> None:
        self.gossip, self.identity, self.maker, self.victim_id = gossip, identity, maker, victim_id
        self._victim = victim
        self.shelf: dict[bytes, bytes] = {}
        self.requested_ids: set[bytes] = set()
        self.answers: Callable[[], Sequence[bytes]] = tuple
        self.number = 0
        gossip.serve(self._lookup, answer=self._answer)

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def link(self) -> Any:
        """The running session: p2pd's control socket and the directory."""
        assert self.gossip._supervisor.session is not None
        return self.gossip._supervisor.session

    def stream(self, service: RpcService, *, timeout_s: float = 30.0) -> Any:
        """A raw stream of a service of the victim's."""
        name = protocol(self.maker.manifest.run_id, service)
        return self.link.client.stream(self.victim_id, name, timeout_s=timeout_s)

    def group(self, **changes: Any) -> Group:
        """Its next group, in good form."""
        self.number += 1
        return self.maker.group(self.identity, changes.pop("number", self.number), **changes)

    def envelope(self, group: Group) -> Envelope:
        return seal_group(group, self.identity)

    def claim(self, group_id: bytes, data: bytes, **changes: Any) -> bytes:
        """An announcement of a body; also puts that body on the shelf."""
        self.shelf[group_id] = data
        announcement = Announcement(
            id=group_id,
            number=UNUSED + len(self.shelf),
            envelope_bytes=max(1, len(data)),
            num_tokens=64,
            tokenizer=bytes.fromhex(self.maker.tokenizer.fingerprint)[:8],
            policy_version=1,
            created_at=time.time(),
        )
        return replace(announcement, **changes).to_bytes()

    async def offer(self, *groups: Group | Envelope, within_s: float = 30.0) -> None:
        """Announces groups until the victim has asked for every one of them."""
        envelopes = [one if isinstance(one, Envelope) else self.envelope(one) for one in groups]
        claims = {
            envelope.id: self.claim(envelope.id, envelope.to_bytes(), **_number_of(group))
            for group, envelope in zip(groups, envelopes, strict=True)
        }
        await self.announce_until_requested(claims, within_s=within_s)

    async def announce_until_requested(self, claims: dict[bytes, bytes], *, within_s: float = 30.0) -> None:
        """Says announcements, by the group's id, until the victim asked for each of those groups, or banned us."""
        async with asyncio.timeout(within_s):
            while (missing := claims.keys() - self.requested_ids) and not await patiently(self._is_banned):
                for group_id in missing:
                    await self.gossip.announce(claims[group_id])
                await asyncio.sleep(AGAIN_S)

    async def keep_sending(self, *, period_s: float = HONEST_PERIOD_S) -> None:
        """What an honest peer does, until cancelled: a group every `period_s`, as well as its machine allows."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + period_s, loop.time())
            group = self.group(num_tokens=12)
            envelope = self.envelope(group)
            claim = self.claim(envelope.id, envelope.to_bytes(), number=group.number)
            self.answers = lambda claim=claim: (claim,)
            await self.gossip.announce(claim)
            self._forget()
            await asyncio.sleep(due - loop.time())

    def _forget(self) -> None:
        """Old groups; a node asks for what is new."""
        for old in list(self.shelf)[:-NUM_KEPT]:
            del self.shelf[old]
            self.requested_ids.discard(old)

    async def _is_banned(self) -> bool:
        return await self._victim.is_banned(self.peer_id)

    async def _lookup(self, ids: Sequence[bytes]) -> list[bytes]:
        self.requested_ids.update(ids)
        return [self.shelf[one] for one in ids if one in self.shelf]

    async def _answer(self, peer_id: str, question: bytes) -> Sequence[bytes]:
        return self.answers()


Script = "Callable[[Service, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]"


class ScriptedServer:
    """In the place of the stream server: whatever is asked is answered with the bytes that a script writes."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._serving: set[asyncio.Task[None]] = set()

    def __call__(self, *_: Any, **__: Any) -> ScriptedServer:
        return self

    async def listen(self, path: Path) -> None:
        self._server = await asyncio.start_unix_server(self._accept, path=path)

    async def close(self) -> None:
        await close_server(self._server)
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = p2pd_pb2.StreamInfo()
        try:
            await read_pbmsg_safe(reader, info)
            await self._script(service_of(info.proto), reader, writer)
        except (OSError, EOFError):
            pass  # the victim has had enough


@asynccontextmanager
async def joined(
    folder: Path,
    maker: GroupMaker,
    victim: Victim,
    *,
    script: Script | None = None,
    prepare: Callable[[Member], None] = lambda member: None,
) -> AsyncIterator[Member]:
    """A new identity, connected to the victim. `prepare` is called before it is; `script` serves in its place."""
    identity, addresses = Identity.generate(), await victim.until(victim.addresses)
    gossip = Libp2pGossip(
        settings(folder, peers=tuple(addresses)), identity=identity, run_id=maker.manifest.run_id, limits=LIMITS
    )
    victim_id = addresses[0].rsplit("/", 1)[1]
    member = Member(gossip, identity, maker, victim, victim_id)
    prepare(member)
    server = None if script is None else ScriptedServer(script)
    async with STARTING:  # what is patched is the module's: one at a time
        with patch.object(session, "StreamServer", server or session.StreamServer):
            await gossip.start()
    try:
        await eventually(lambda: _is_connected(gossip, victim_id))
        yield member
    finally:
        await gossip.close()


def _number_of(group: Group | Envelope) -> dict[str, int]:
    return {"number": group.number} if isinstance(group, Group) else {}


async def _is_connected(gossip: Libp2pGossip, peer_id: str) -> bool:
    return peer_id in {peer.peer_id for peer in await gossip.connected_peers()}


@asynccontextmanager
async def sending(member: Member, *, period_s: float = HONEST_PERIOD_S) -> AsyncIterator[Member]:
    """An honest member at work."""
    task = asyncio.create_task(member.keep_sending(period_s=period_s))
    try:
        yield member
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
