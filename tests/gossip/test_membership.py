"""Rounds of dialing with a fake p2pd and directory: who is dialed, when, and after how many reads."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ftis_node.backoff import ExponentialBackoff
from ftis_node.gossip import PeerConnection, SwarmPhase
from ftis_node.gossip.membership import MAX_KNOWN, Membership
from ftis_node.gossip.p2pd.client import P2pdError
from ftis_node.gossip.wire_format import RpcService
from ftis_node.records.identity import Identity
from ftis_node.swarm.topology import NUM_MEMBER_BUCKETS, bucket_of, shard_of
from tests.gossip.helpers import settings
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from collections.abc import Set as AbstractSet
    from pathlib import Path

OWN = Identity.from_seed(bytes([255]) * 32).peer_id
GIVEN = Identity.from_seed(bytes([254]) * 32).peer_id
GIVEN_ADDRESS = f"/ip4/192.0.2.1/tcp/4001/p2p/{GIVEN}"
STRANGERS = [Identity.from_seed(bytes([number]) * 32).peer_id for number in range(100)]


class FakeControl:
    """Dials whoever is in `alive`."""

    def __init__(self, alive: Iterable[str]) -> None:
        self.alive = set(alive)
        self.connected: list[str] = []
        self.own = ["/ip4/192.0.2.9/tcp/1"]
        self.dialed: list[tuple[str, list[str]]] = []

    async def identify(self) -> tuple[str, ...]:
        return tuple(self.own)

    async def connected_peers(self) -> list[PeerConnection]:
        return [PeerConnection(peer_id, ()) for peer_id in self.connected]

    async def connect(self, peer_id: str, addresses: Iterable[str], *, timeout_s: float) -> None:
        self.dialed.append((peer_id, list(addresses)))
        if peer_id not in self.alive:
            raise P2pdError("connection refused")
        self.connected.append(peer_id)


class FakeDirectory:
    """Answers once somebody was met in it."""

    def __init__(self, members: Iterable[str] = ()) -> None:
        self.entries = {peer_id: [f"/ip4/192.0.2.2/tcp/1/p2p/{peer_id}"] for peer_id in members}
        self.met: list[str] = []
        self.registered: list[tuple[str, bytes]] = []
        self.num_buckets_read = 0
        self.is_serving: bool | None = None

    def serve(self, is_serving: bool) -> None:
        self.is_serving = is_serving

    async def join(self, peer_ids: list[str]) -> int:
        self.met += peer_ids
        return len(peer_ids)

    async def register(self, run_id: str, payload: bytes, *, ttl_s: float) -> bool:
        self.registered.append((run_id, payload))
        return True

    async def members(self, run_id: str, buckets: list[int]) -> dict[str, list[str]]:
        self.num_buckets_read += len(buckets)
        return {peer: known for peer, known in self.entries.items() if self.met and bucket_of(peer) in buckets}


class FakeSession:
    """Strangers are members of the run."""

    def __init__(self, control: FakeControl, directory: FakeDirectory, *, old: AbstractSet[str] = frozenset()) -> None:
        self.client = control
        self.directory = directory
        self.queried: list[str] = []
        self.old = old  # members that read no batches

    async def serves(self, peer_id: str, run_id: str, service: RpcService, *, timeout_s: float) -> bool | None:
        if service is RpcService.BATCHES:
            return peer_id not in self.old
        self.queried.append(peer_id)
        if run_id != "r" or self.queried.count(peer_id) < 2:
            return None  # no answer yet
        return peer_id != GIVEN


@asynccontextmanager
async def kept(
    folder: Path,
    control: FakeControl,
    directory: FakeDirectory,
    *,
    num_shards: int = 1,
    old: AbstractSet[str] = frozenset(),
    **changes: Any,
) -> AsyncIterator[Membership]:
    """A membership at work until the context is left."""
    values = {"peers": (GIVEN_ADDRESS,), "poll_s": 0.01} | changes
    membership = Membership(
        settings(folder, **values), run_id="r", peer_id=OWN, rng=random.Random(1), num_shards=num_shards
    )
    membership.read_shards = frozenset([shard_of(OWN, num_shards)])
    session: Any = FakeSession(control, directory, old=old)
    await membership.poll(session)
    keeping = asyncio.create_task(membership.keep(session))
    try:
        yield membership
        assert not keeping.done()
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})


async def test_members_are_found_through_the_given_peer_and_dialed(tmp_path: Path) -> None:
    control, directory = FakeControl([GIVEN, *STRANGERS[:3]]), FakeDirectory(STRANGERS[:3])
    async with kept(tmp_path, control, directory) as membership:
        assert membership.state().state is SwarmPhase.STARTING
        await eventually(lambda: membership.state().state is SwarmPhase.CONNECTED)
    assert control.dialed[0] == (GIVEN, ["/ip4/192.0.2.1/tcp/4001"])
    assert sorted(control.dialed[1:]) == [(peer, ["/ip4/192.0.2.2/tcp/1"]) for peer in sorted(STRANGERS[:3])]
    assert directory.met == [GIVEN]
    assert directory.registered == [("r", f"shards=1\n/ip4/192.0.2.9/tcp/1/p2p/{OWN}\n".encode())]


async def test_a_small_run_is_read_whole_and_a_large_one_in_part(tmp_path: Path) -> None:
    for members, num_dialed, num_read in ((STRANGERS[:3], 3, NUM_MEMBER_BUCKETS), (STRANGERS, 8, 16)):
        control, directory = FakeControl([GIVEN, *members]), FakeDirectory(members)
        async with kept(tmp_path, control, directory, num_shards=64) as membership:
            await eventually(lambda membership=membership: membership.state().state is SwarmPhase.CONNECTED)
        assert len(control.dialed) - 1 == num_dialed
        assert directory.num_buckets_read == num_read


async def test_what_is_remembered_of_members_is_bounded(tmp_path: Path) -> None:
    many = [Identity.from_seed(number.to_bytes(32, "big")).peer_id for number in range(MAX_KNOWN + 50)]
    control, directory = FakeControl([GIVEN, *many]), FakeDirectory(many)
    async with kept(tmp_path, control, directory, num_target_members=MAX_KNOWN + 50) as membership:
        await eventually(lambda: membership.state().state is SwarmPhase.CONNECTED)
    assert len(control.dialed) - 1 == MAX_KNOWN


async def test_batches_wait_until_every_known_member_is_connected_and_reads_them(tmp_path: Path) -> None:
    control, directory = FakeControl([GIVEN, *STRANGERS[:3]]), FakeDirectory(STRANGERS[:3])
    async with kept(tmp_path, control, directory, check_s=0.05) as membership:
        assert not membership.all_read_batches(), "no member is known"
        await eventually(membership.all_read_batches)
        directory.entries[STRANGERS[3]] = directory.entries[STRANGERS[0]]  # listed, and cannot be reached
        await eventually(lambda: STRANGERS[3] in membership.known_members())
        assert not membership.all_read_batches()


async def test_one_member_that_reads_no_batches_is_enough_for_single_announcements(tmp_path: Path) -> None:
    control, directory = FakeControl([GIVEN, *STRANGERS[:3]]), FakeDirectory(STRANGERS[:3])
    async with kept(tmp_path, control, directory, old=frozenset([STRANGERS[1]])) as membership:
        await eventually(lambda: len(membership.members) == 3 and len(membership._batches.members) == 2)
        await asyncio.sleep(0.1)
        assert not membership.all_read_batches()


async def test_a_member_that_was_out_of_reach_is_asked_again_whether_it_reads_batches(tmp_path: Path) -> None:
    control, directory = FakeControl([GIVEN, *STRANGERS[:3]]), FakeDirectory(STRANGERS[:3])
    unreachable = {STRANGERS[1]}
    async with kept(tmp_path, control, directory, check_s=0.05, old=unreachable) as membership:
        await eventually(lambda: len(membership.members) == 3 and len(membership._batches.members) == 2)
        unreachable.clear()
        await eventually(membership.all_read_batches)


async def test_a_node_that_loses_its_last_member_dials_at_once(tmp_path: Path) -> None:
    control, directory = FakeControl([GIVEN, *STRANGERS[:3]]), FakeDirectory(STRANGERS[:3])
    async with kept(tmp_path, control, directory, check_s=999) as membership:
        await eventually(lambda: membership.state().state is SwarmPhase.CONNECTED)
        directory.entries.clear()  # the directory has forgotten, the node has not
        control.connected.clear()
        await eventually(lambda: len(control.connected) == 4, within_s=3)


async def test_a_dead_given_peer_is_dialed_again_and_again(tmp_path: Path) -> None:
    control, directory = FakeControl([]), FakeDirectory()
    async with kept(tmp_path, control, directory) as membership:
        await eventually(lambda: len(control.dialed) >= 2)
        assert membership.state().reason.startswith(
            ("no bootstrap peer answers, retrying in ", "no bootstrap peer answers, retrying now ")
        )
        assert membership.state().reason.endswith("(connection refused)")
        control.alive.add(GIVEN)
        await eventually(lambda: membership.state().reason.startswith("1 peer connected, but no member"))


async def test_a_silent_directory_is_no_loss_of_the_network(tmp_path: Path) -> None:
    control, directory = FakeControl([GIVEN]), FakeDirectory()

    async def never(*args: Any, **kwargs: Any) -> Any:
        raise TimeoutError

    directory.join = directory.register = directory.members = never  # type: ignore[method-assign]
    async with kept(tmp_path, control, directory) as membership:
        await eventually(lambda: membership.state().reason.startswith("1 peer connected"))


async def test_the_own_shard_is_listed_whole(tmp_path: Path) -> None:
    own = [peer_id for peer_id in STRANGERS if shard_of(peer_id, 4) == shard_of(OWN, 4)]
    control, directory = FakeControl([GIVEN, *STRANGERS]), FakeDirectory(STRANGERS)
    async with kept(tmp_path, control, directory, num_shards=4) as membership:
        await eventually(lambda: membership.state().state is SwarmPhase.CONNECTED)
        assert set(membership.shard_members) >= set(own)
        assert not set(own) - set(membership.shard_members)
    assert len(own) > len(STRANGERS) / 8


async def test_one_lost_member_of_several_is_dialed_again(tmp_path: Path) -> None:
    control, directory = FakeControl([GIVEN, *STRANGERS[:3]]), FakeDirectory(STRANGERS[:3])
    redial = ExponentialBackoff(first_s=0.1, ceiling_s=0.1)
    async with kept(tmp_path, control, directory, check_s=999, redial=redial) as membership:
        await eventually(lambda: len(membership.members) == 3)
        lost = STRANGERS[1]
        control.connected.remove(lost)
        await eventually(lambda: control.dialed.count((lost, ["/ip4/192.0.2.2/tcp/1"])) == 2, within_s=3)
        await eventually(lambda: len(membership.members) == 3)


async def test_a_node_keeps_entries_for_others_unless_it_is_behind_a_relay(tmp_path: Path) -> None:
    control, directory = FakeControl([GIVEN]), FakeDirectory()
    async with kept(tmp_path, control, directory):
        await eventually(lambda: directory.is_serving)
        control.own.append(f"/ip4/192.0.2.1/tcp/4001/p2p/{GIVEN}/p2p-circuit")
        await eventually(lambda: directory.is_serving is False)
    async with kept(tmp_path, FakeControl([GIVEN]), directory := FakeDirectory(), is_unreachable=True):
        await eventually(lambda: directory.is_serving is False)
