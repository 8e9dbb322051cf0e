"""A member of the victim's run under the control of a test: an attacker, or the honest peer."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.stubs.group_maker import GroupMaker
from ftis_node.gossip import MAX_ANSWERS, GossipLimits
from ftis_node.gossip.directory.entries import EntryKind, pack_member, sign_entry
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.gossip.names import RpcService, bucket_key, protocol
from ftis_node.gossip.p2pd import session
from ftis_node.gossip.p2pd.client import P2pdError
from ftis_node.gossip.p2pd.hivemind_bindings import p2pd_pb2, read_pbmsg_safe
from ftis_node.gossip.streams import close_server
from ftis_node.records.envelope import Announcement, Envelope, seal_group
from ftis_node.records.group import Group
from ftis_node.records.identity import ENVELOPE_DOMAIN, Identity
from ftis_node.records.peer_messages import open_backfill_request
from ftis_node.swarm.topology import bucket_of
from tests.attacks.messages import Script, record
from tests.attacks.victim import Victim, none_if_unanswered
from tests.gossip.helpers import settings
from tests.waiting import eventually

Claims = dict[bytes, bytes]  # announcements by the ids of their groups
Attack = Callable[..., Awaitable[object]]  # of the victim, a member, and the values of a case

REANNOUNCE_PERIOD_S = 0.4  # gossipsub drops announcements until its mesh is complete
WITHIN_S = 60.0
HONEST_PERIOD_S = 0.5
MAX_AT_ONCE = 12
UNUSED = 10**9  # sequence numbers from here on belong to no group of the tests
LIMITS = GossipLimits(max_envelope_bytes=4 << 20, max_queued_announcements=64)
GONE = (OSError, EOFError, P2pdError)  # the victim closed or refused a stream
SCRIPTED_START = asyncio.Lock()  # it changes a module


def change_completion(group: Group, position: int = 1, **changes: Any) -> Group:
    completions = list(group.completions)
    completions[position] = replace(completions[position], **changes)
    return group.with_completions(completions)


def varint(value: int) -> bytes:
    """Return the protobuf varint of a number."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def sign_body(body: bytes, identity: Identity) -> Envelope:
    return Envelope(hashlib.sha256(body).digest(), body, identity.sign(ENVELOPE_DOMAIN, body))


class Member:
    """A peer with its own p2pd in the test's process. The test sets its bodies, answers and announcements."""

    def __init__(
        self, gossip: Libp2pGossip, identity: Identity, maker: GroupMaker, victim: Any = None, victim_id: str = ""
    ) -> None:
        self.gossip, self.identity, self.maker, self.victim_id = gossip, identity, maker, victim_id
        self._victim = victim
        self.bodies: dict[bytes, bytes] = {}
        self.requested_ids: set[bytes] = set()
        self.answers: Callable[[], Sequence[bytes]] = tuple
        self.number = 0
        self.num_tokens = 24  # of a completion
        self.other = Identity.generate()  # a sender whose name it misuses
        gossip.serve(self._lookup, answer=self._answer)

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def link(self) -> Any:
        """The running session, with the control socket of p2pd and the directory."""
        assert self.gossip._supervisor.session is not None
        return self.gossip._supervisor.session

    def stream(self, service: RpcService, *, timeout_s: float = 30.0) -> Any:
        name = protocol(self.maker.manifest.run_id, service)
        return self.link.client.stream(self.victim_id, name, timeout_s=timeout_s)

    def group(self, **changes: Any) -> Group:
        self.number += 1
        return self.maker.group(
            self.identity, changes.pop("number", self.number), **{"num_tokens": self.num_tokens} | changes
        )

    def envelope(self, group: Group) -> Envelope:
        return seal_group(group, self.identity)

    def announcement(self, group_id: bytes, **changes: Any) -> bytes:
        """Return an announcement with changed fields."""
        announcement = Announcement(
            id=group_id,
            number=UNUSED + len(self.bodies),
            envelope_bytes=500,
            num_tokens=64,
            tokenizer=bytes.fromhex(self.maker.tokenizer.fingerprint)[:8],
            policy_version=1,
            created_at=time.time(),
        )
        return replace(announcement, **changes).to_bytes()

    def claim(self, group_id: bytes, data: bytes, **changes: Any) -> bytes:
        """Store a body and return its announcement."""
        self.bodies[group_id] = data
        return self.announcement(group_id, **{"envelope_bytes": max(1, len(data)), **changes})

    def claims(self, *groups: Group | Envelope, **changes: Any) -> Claims:
        """Store groups and return their announcements. That of an envelope has an unused number."""
        claims = {}
        for one in groups:
            envelope = one if isinstance(one, Envelope) else self.envelope(one)
            number = {"number": one.number} if isinstance(one, Group) else {}
            claims[envelope.id] = self.claim(envelope.id, envelope.to_bytes(), **number, **changes)
        return claims

    async def offer(self, *groups: Group | Envelope, within_s: float = WITHIN_S) -> None:
        """Announce groups until the victim has requested each of them."""
        await self.announce_until_requested(self.claims(*groups), within_s=within_s)

    async def publish_record(self, *, grader: str) -> None:
        """Publish a directory record that names this release; return when the victim has read it."""
        data = record(self, grader=grader, transformers=metadata.version("transformers"))

        async def is_read() -> bool:
            await self.gossip.publish_record(data, ttl_s=120)
            return ((await self._victim.row(self.peer_id)).get("releases") or {}).get("grader") == grader

        await self._victim.until(is_read)

    async def announce_nonexistent(self, count: int, *, num_at_once: int) -> None:
        """Announce `count` groups without bodies, as fast as p2pd accepts them."""

        async def announce_share() -> None:
            for _ in range(count // num_at_once):
                group_id = os.urandom(32)
                claim = self.claim(group_id, b"", envelope_bytes=100, number=2**62)
                del self.bodies[group_id]  # no body is sent, because an empty one would ban by itself
                await self.gossip.announce(claim)

        await asyncio.gather(*(announce_share() for _ in range(num_at_once)))

    async def announce_until_requested(self, claims: Claims, *, within_s: float = WITHIN_S) -> None:
        """Repeat announcements, by group id, until the victim requests each group or bans this member."""
        async with asyncio.timeout(within_s):
            while (missing := claims.keys() - self.requested_ids) and not await none_if_unanswered(self._is_banned):
                for group_id in missing:
                    await self.gossip.announce(claims[group_id])
                await asyncio.sleep(REANNOUNCE_PERIOD_S)

    def answer_with_groups_of(self, senders: Sequence[Identity]) -> None:
        """Answer questions with announcements of one valid group of each sender, in pages by time as a node does.

        A page is answered again if its first answer was late.
        """
        claims: dict[float, bytes] = {}
        for at, sender in enumerate(senders, start=-len(senders)):
            created_at = round(time.time() + at / 100, 3)
            envelope = seal_group(replace(self.maker.group(sender, 1), created_at=created_at), sender)
            claims[created_at] = self.claim(
                envelope.id, envelope.to_bytes(), sender=sender.peer_id, number=1, created_at=created_at
            )

        async def page(peer_id: str, question: bytes) -> Sequence[bytes]:
            since = open_backfill_request(question).since - 0.002
            return [claim for created_at, claim in claims.items() if created_at > since][:MAX_ANSWERS]

        self.gossip.serve(self._lookup, answer=page)

    async def register(
        self, transports: Sequence[Sequence[str]], *, ttl_s: float, identities: Sequence[Identity] = ()
    ) -> int:
        """Register a member for each list of addresses, an invented one without `identities`.

        Returns how many entries the directory stored.
        """
        run_id, expires_at = self.maker.manifest.run_id, time.time() + ttl_s
        members = identities or [Identity.generate() for _ in transports]
        entries = []
        for one, each in zip(members, transports, strict=True):
            payload = pack_member([f"{transport}/p2p/{one.peer_id}" for transport in each], num_shards=1)
            entries.append(sign_entry(one, EntryKind.MEMBER, run_id, payload, expires_at=expires_at))
        keys, subkeys = (
            [bucket_key(run_id, bucket_of(one.peer_id)) for one in members],
            [one.peer_id for one in members],
        )
        stored = await self.link.directory._node.store_many(keys, entries, expires_at, subkeys=subkeys)
        return sum(map(bool, stored.values()))

    async def keep_sending(self, *, num_tokens: int = 12, period_s: float = HONEST_PERIOD_S) -> None:
        """Send a valid group every `period_s` until cancelled."""
        while True:
            (claim,) = self.claims(self.group(num_tokens=num_tokens)).values()
            self.answers = lambda claim=claim: (claim,)
            await self.gossip.announce(claim)
            await asyncio.sleep(period_s)

    async def _is_banned(self) -> bool:
        return await self._victim.is_banned(self.peer_id)

    async def _lookup(self, ids: Sequence[bytes]) -> list[bytes]:
        self.requested_ids.update(ids)
        return [self.bodies[one] for one in ids if one in self.bodies]

    async def _answer(self, peer_id: str, question: bytes) -> Sequence[bytes]:
        return self.answers()


class ScriptedServer:
    """A replacement of the stream server: a script writes the answer to each request."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._serving: set[asyncio.Task[None]] = set()

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
            await self._script(reader, writer)
        except (OSError, EOFError):
            pass  # the victim closed the stream


@asynccontextmanager
async def joined(
    folder: Path,
    maker: GroupMaker,
    victim: Victim,
    *,
    script: Script | None = None,
    prepare: Callable[[Member], None] = lambda member: None,
) -> AsyncIterator[Member]:
    """Yield a new member that is connected to the victim.

    `prepare` runs before the connection. `script`, if given, answers all requests.
    """
    identity, addresses = Identity.generate(), await victim.until(victim.addresses)
    gossip = Libp2pGossip(
        settings(folder, peers=tuple(addresses)), identity=identity, run_id=maker.manifest.run_id, limits=LIMITS
    )
    victim_id = addresses[0].rsplit("/", 1)[1]
    member = Member(gossip, identity, maker, victim, victim_id)
    prepare(member)
    if script is None:
        await gossip.start()
    else:
        async with SCRIPTED_START:
            real, scripted = session.StreamServer, ScriptedServer(script)

            def server_of(config: Any) -> Any:
                return scripted if config.identity.peer_id == identity.peer_id else real(config)

            with patch.object(session, "StreamServer", server_of):
                await gossip.start()
    try:
        await eventually(lambda: _is_connected(gossip, victim_id))
        yield member
    finally:
        await gossip.close()


async def _is_connected(gossip: Libp2pGossip, peer_id: str) -> bool:
    return peer_id in {peer.peer_id for peer in await gossip.connected_peers()}


@dataclass
class Scene:
    """The victim, and what its attackers share."""

    victim: Victim
    maker: GroupMaker
    sockets: Path
    rng: random.Random = field(default_factory=random.Random)

    def folder(self) -> Path:
        return self.sockets / os.urandom(4).hex()

    @asynccontextmanager
    async def member(self, **options: Any) -> AsyncIterator[Member]:
        async with joined(self.folder(), self.maker, self.victim, **options) as member:
            yield member

    async def attack(self, attack: Attack, *case: Any) -> None:
        """Let a new member attack the victim."""
        async with self.member() as attacker:
            await attack(self.victim, attacker, *case)

    async def at_once(self, attacks: Mapping[str, Callable[[], Awaitable[object]]]) -> None:
        """Run attacks in parallel, at most `MAX_AT_ONCE`, and then raise the errors of those that failed."""
        limit = asyncio.Semaphore(MAX_AT_ONCE)

        async def run(name: str, attack: Callable[[], Awaitable[object]]) -> None:
            try:
                async with limit:
                    await attack()
            except Exception as error:
                error.add_note(f"of the attack: {name}")
                raise

        ended = await asyncio.gather(*(run(*item) for item in attacks.items()), return_exceptions=True)
        if errors := [error for error in ended if isinstance(error, Exception)]:
            raise ExceptionGroup("attacks that did not end as expected", errors)

    def by_members(self, *attacks: Attack) -> dict[str, Callable[[], Awaitable[object]]]:
        """Return attacks for `at_once`, each by a new member."""
        return {attack.__name__: partial(self.attack, attack) for attack in attacks}
