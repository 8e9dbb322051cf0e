"""The members of a run: which are dialed, how they answer a hello, and whose topics a node forwards."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ftis_node.backoff import ExponentialBackoff
from ftis_node.gossip import PeerConnection, SwarmPhase, dialer
from ftis_node.gossip.bootstrap_node import MAX_TOPICS
from ftis_node.gossip.directory.storage import StoredRun
from ftis_node.gossip.membership import MAX_HELLOS_IN_FLIGHT, MAX_KNOWN, MemberProbe, Membership
from ftis_node.gossip.names import topic
from ftis_node.gossip.p2pd.client import P2pdError
from ftis_node.records.identity import Identity
from ftis_node.swarm.topology import NUM_MEMBER_BUCKETS, bucket_of, shard_of
from tests.gossip.helpers import settings
from tests.waiting import eventually

OWN = Identity.from_seed(bytes([255]) * 32).peer_id
GIVEN = Identity.from_seed(bytes([254]) * 32).peer_id
GIVEN_ADDRESS = f"/ip4/192.0.2.1/tcp/4001/p2p/{GIVEN}"
PEERS = [Identity.from_seed(bytes([number]) * 32).peer_id for number in range(100)]


class FakeControl:
    """A control client that connects to the peers in `alive`."""

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
    """A directory that answers after the node has joined a peer."""

    def __init__(self, members: Iterable[str] = ()) -> None:
        self.entries = {peer_id: ["/ip4/192.0.2.2/tcp/1"] for peer_id in members}
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
    """A session in which all peers except `GIVEN` are members of the run."""

    def __init__(self, control: FakeControl, directory: FakeDirectory) -> None:
        self.client = control
        self.directory = directory
        self.queried: list[str] = []

    async def is_member(self, peer_id: str, run_id: str, *, timeout_s: float) -> bool | None:
        self.queried.append(peer_id)
        if run_id != "r" or self.queried.count(peer_id) < 2:
            return None  # no answer yet
        return peer_id != GIVEN


@asynccontextmanager
async def running_membership(
    folder: Path, control: FakeControl, directory: FakeDirectory, *, num_shards: int = 1, **changes: Any
) -> AsyncIterator[Membership]:
    """Yield a membership that polls until the context ends."""
    values = {"peers": (GIVEN_ADDRESS,), "poll_s": 0.01} | changes
    membership = Membership(
        settings(folder, **values), run_id="r", peer_id=OWN, rng=random.Random(1), num_shards=num_shards
    )
    membership.read_shards = frozenset([shard_of(OWN, num_shards)])
    session: Any = FakeSession(control, directory)
    await membership.poll(session)
    keeping = asyncio.create_task(membership.keep(session))
    try:
        yield membership
        assert not keeping.done()
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})


async def test_members_are_found_through_the_given_peer_and_dialed(tmp_path):
    control, directory = FakeControl([GIVEN, *PEERS[:3]]), FakeDirectory(PEERS[:3])
    async with running_membership(tmp_path, control, directory) as membership:
        assert membership.state().state is SwarmPhase.STARTING
        await eventually(lambda: membership.state().state is SwarmPhase.CONNECTED)
    assert control.dialed[0] == (GIVEN, ["/ip4/192.0.2.1/tcp/4001"])
    assert sorted(control.dialed[1:]) == [(peer, ["/ip4/192.0.2.2/tcp/1"]) for peer in sorted(PEERS[:3])]
    assert directory.met == [GIVEN]
    assert directory.registered == [("r", f"shards=1\n/ip4/192.0.2.9/tcp/1/p2p/{OWN}\n".encode())]


async def test_a_small_run_is_listed_completely_and_a_large_one_partly(tmp_path):
    for members, num_dialed, num_read in ((PEERS[:3], 3, NUM_MEMBER_BUCKETS), (PEERS, 8, 16)):
        control, directory = FakeControl([GIVEN, *members]), FakeDirectory(members)
        async with running_membership(tmp_path, control, directory, num_shards=64) as membership:
            await eventually(lambda membership=membership: membership.state().state is SwarmPhase.CONNECTED)
        assert (len(control.dialed) - 1, directory.num_buckets_read) == (num_dialed, num_read)


async def test_the_number_of_known_members_is_bounded(tmp_path):
    many = [Identity.from_seed(number.to_bytes(32, "big")).peer_id for number in range(MAX_KNOWN + 50)]
    control, directory = FakeControl([GIVEN, *many]), FakeDirectory(many)
    async with running_membership(tmp_path, control, directory, num_target_members=MAX_KNOWN + 50) as membership:
        await eventually(lambda: membership.state().state is SwarmPhase.CONNECTED)
    assert len(control.dialed) - 1 == MAX_KNOWN


async def test_a_node_that_loses_its_last_member_dials_at_once(tmp_path):
    control, directory = FakeControl([GIVEN, *PEERS[:3]]), FakeDirectory(PEERS[:3])
    async with running_membership(tmp_path, control, directory, check_s=999) as membership:
        await eventually(lambda: membership.state().state is SwarmPhase.CONNECTED)
        directory.entries.clear()  # the node still knows the members, the directory does not
        control.connected.clear()
        await eventually(lambda: len(control.connected) == 4, within_s=3)


async def test_an_unreachable_bootstrap_peer_is_dialed_repeatedly(tmp_path):
    control, directory = FakeControl([]), FakeDirectory()
    async with running_membership(tmp_path, control, directory) as membership:
        await eventually(lambda: len(control.dialed) >= 2)
        assert membership.state().reason.startswith(
            ("no bootstrap peer answers, retrying in ", "no bootstrap peer answers, retrying now ")
        )
        assert membership.state().reason.endswith("(connection refused)")
        control.alive.add(GIVEN)
        await eventually(lambda: membership.state().reason.startswith("1 peer connected, but no member"))


async def test_a_silent_directory_does_not_disconnect_the_node(tmp_path):
    control, directory = FakeControl([GIVEN]), FakeDirectory()

    async def never(*args, **kwargs):
        raise TimeoutError

    directory.join = directory.register = directory.members = never  # type: ignore[method-assign]
    async with running_membership(tmp_path, control, directory) as membership:
        await eventually(lambda: membership.state().reason.startswith("1 peer connected"))


async def test_the_shard_members_are_all_members_of_the_own_shard(tmp_path):
    own = [peer_id for peer_id in PEERS if shard_of(peer_id, 4) == shard_of(OWN, 4)]
    control, directory = FakeControl([GIVEN, *PEERS]), FakeDirectory(PEERS)
    async with running_membership(tmp_path, control, directory, num_shards=4) as membership:
        await eventually(lambda: membership.state().state is SwarmPhase.CONNECTED)
        assert set(membership.shard_members) == set(own)
        of_another_shard = next(peer_id for peer_id in PEERS if peer_id not in own)
        control.connected.append(of_another_shard)
        await eventually(lambda: of_another_shard in membership.members)
        assert set(membership.shard_members) == set(own)
    assert len(own) > len(PEERS) / 8


async def test_a_member_that_stays_lost_is_dialed_a_limited_number_of_times(tmp_path, monkeypatch):
    monkeypatch.setattr(dialer, "MAX_REDIALS", 3)
    control, directory = FakeControl([GIVEN, *PEERS[:2]]), FakeDirectory(PEERS[:2])
    redial, retry = (ExponentialBackoff(first_s=one, ceiling_s=one) for one in (0.02, 999.0))
    async with running_membership(tmp_path, control, directory, check_s=999, redial=redial, retry=retry) as membership:
        await eventually(lambda: len(membership.members) == 2)
        await asyncio.sleep(0.1)  # the members are met
        control.alive.remove(PEERS[1])
        control.connected.remove(PEERS[1])
        dials = lambda: [peer_id for peer_id, _ in control.dialed].count(PEERS[1])  # noqa: E731
        await eventually(lambda: dials() == 4)
        await asyncio.sleep(0.2)
        assert dials() == 4
        control.alive.add(PEERS[1])
        control.connected.append(PEERS[1])
        await eventually(lambda: len(membership.members) == 2)
        await asyncio.sleep(0.1)
        control.connected.remove(PEERS[1])  # met again, so dialed again
        await eventually(lambda: dials() == 5)


async def test_a_node_stores_entries_of_others_unless_it_is_behind_a_relay(tmp_path):
    control, directory = FakeControl([GIVEN]), FakeDirectory()
    async with running_membership(tmp_path, control, directory):
        await eventually(lambda: directory.is_serving)
        control.own.append(f"/ip4/192.0.2.1/tcp/4001/p2p/{GIVEN}/p2p-circuit")
        await eventually(lambda: directory.is_serving is False)


LARGER = "ff" * 16
SMALL_RUNS = {f"{number:032x}": StoredRun(8, 1) for number in range(MAX_TOPICS)}


def _topics() -> set[str]:
    names = [task.get_name() for task in asyncio.all_tasks() if not task.cancelling()]
    return {name.removeprefix("topic ") for name in names if name.startswith("topic ")}


async def test_many_small_runs_take_no_topic_from_a_larger_run(start, monkeypatch):
    node = await start(run_id=None, forward_s=0.05)
    directory = node._supervisor.session.directory
    monkeypatch.setattr(directory, "stored_runs", lambda: SMALL_RUNS)
    await eventually(lambda: len(_topics()) == MAX_TOPICS)
    monkeypatch.setattr(directory, "stored_runs", lambda: {LARGER: StoredRun(8, 3)} | SMALL_RUNS)
    larger = {topic(LARGER, shard) for shard in range(8)}
    await eventually(lambda: larger <= _topics() and len(_topics()) == MAX_TOPICS)  # new ones first


async def test_larger_runs_take_no_topic_from_a_pinned_run(start, monkeypatch):
    node = await start(run_id=None, forward_s=0.05)
    node.pinned_runs = [LARGER, "ee" * 16]
    larger = {run_id: StoredRun(64, 11) for run_id in SMALL_RUNS}
    monkeypatch.setattr(node._supervisor.session.directory, "stored_runs", lambda: larger | {LARGER: StoredRun(8, 1)})
    expected = {topic(LARGER, shard) for shard in range(8)}
    await eventually(lambda: expected <= _topics() and len(_topics()) == MAX_TOPICS)


class Answers:
    """Answers by peer; None for all others."""

    def __init__(self, **answers: bool) -> None:
        self.by_peer = answers
        self.queried: list[str] = []

    async def __call__(self, peer_id: str) -> bool | None:
        self.queried.append(peer_id)
        return self.by_peer.get(peer_id)


async def _update(probe: MemberProbe, *connected: str) -> list[str]:
    async with asyncio.TaskGroup() as group:
        probe.update(connected, group)
    return probe.members


async def test_peers_that_answer_are_queried_once():
    answers = Answers(member=True, bootstrap=False)
    probe = MemberProbe(answers)
    for _ in range(3):
        assert await _update(probe, "member", "bootstrap") == ["member"]
    assert sorted(answers.queried) == ["bootstrap", "member"]


async def test_silent_peers_are_queried_again_after_pauses_of_up_to_64_s():
    """A peer that has banned this node ends each stream without an answer."""
    answers, now = Answers(), 0
    probe = MemberProbe(answers, clock=lambda: now)
    queried_at = []
    for now in range(200):
        num_queries = len(answers.queried)
        assert await _update(probe, "banned us") == []
        queried_at += [now] * (len(answers.queried) - num_queries)
    assert queried_at == [0, 1, 3, 7, 15, 31, 63, 127, 191]
    answers.by_peer["banned us"], now = True, 255
    assert await _update(probe, "banned us") == ["banned us"]


async def test_a_silent_peer_that_connects_again_is_queried_at_once():
    answers = Answers()
    probe = MemberProbe(answers, clock=lambda: 0.0)
    for connected in (["silent"], ["silent"], [], ["silent"]):
        await _update(probe, *connected)
    assert answers.queried == ["silent", "silent"]


async def test_a_peer_that_answered_no_is_queried_again_after_recheck():
    answers = Answers(starting=False, member=True)
    probe = MemberProbe(answers)
    await _update(probe, "starting", "member")
    answers.by_peer["starting"] = True
    assert await _update(probe, "starting", "member") == ["member"]
    probe.recheck()
    assert probe.members == ["member"]
    assert sorted(await _update(probe, "starting", "member")) == ["member", "starting"]
    assert answers.queried.count("member") == 1


async def test_many_silent_peers_do_not_delay_the_query_of_a_new_one():
    """The silent peers are due again, and their ids sort before that of the new peer."""
    gate, queried, now = asyncio.Event(), list[str](), 0.0
    silent = [f"{number:03d}" for number in range(4 * MAX_HELLOS_IN_FLIGHT)]

    async def query(peer_id):
        queried.append(peer_id)
        if peer_id in silent and now:
            await gate.wait()
        return None if peer_id in silent else True

    probe = MemberProbe(query, clock=lambda: now)
    for _ in silent:
        await _update(probe, *silent)
    assert sorted(queried) == silent
    now = 1000.0
    async with asyncio.TaskGroup() as group:
        probe.update(silent, group)
        probe.update([*silent, "new"], group)
        await asyncio.sleep(0)
        assert queried[-1] == "new"
        gate.set()
    assert probe.members == ["new"]


async def test_queries_in_flight_are_bounded():
    gate, num_queries = asyncio.Event(), 0

    async def query(peer_id):
        nonlocal num_queries
        num_queries += 1
        await gate.wait()
        return True

    probe = MemberProbe(query)
    peers = [f"peer {number}" for number in range(MAX_HELLOS_IN_FLIGHT + 4)]
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            probe.update(peers[:2], group)
            await asyncio.sleep(0)
        assert num_queries == 2
        probe.update(peers, group)
        await asyncio.sleep(0)
        assert num_queries == MAX_HELLOS_IN_FLIGHT
        gate.set()
    await eventually(lambda: _update(probe, *peers))
    assert sorted(probe.members) == sorted(peers)
