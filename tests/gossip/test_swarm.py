"""Real p2pd processes on this machine: connecting, losing peers, crashes, and clean-up."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from ftis_node.backoff import ExponentialBackoff
from ftis_node.errors import MachineError, UsageError
from ftis_node.gossip import FetchOutcome, SwarmPhase
from ftis_node.records.identity import Identity
from tests.gossip.helpers import BodyStore, announce_until_received, files_under, process_is_gone
from tests.waiting import eventually


async def test_members_that_know_only_a_bootstrap_node_find_each_other(start):
    bootstrap = await start(run_id=None)
    nodes = [await start(peers=tuple(bootstrap.addresses)) for _ in range(2)]
    for node in nodes:
        await eventually(lambda node=node: "1 other member" in node.state.reason)
    for node in nodes:
        others = [other for other in nodes if other is not node]
        store = BodyStore(os.urandom(100_000))
        node.serve(store.lookup)
        for other, received in zip(others, await announce_until_received(node, others, store.ids[0]), strict=True):
            fetched = await other.fetch(received.sender, [received.payload])
            assert fetched.items == tuple(store.bodies.values())


async def test_a_bootstrap_node_forwards_announcements_and_is_no_member(start):
    bootstrap = await start(run_id=None, forward_s=0.2)
    unreachable = {"peers": tuple(bootstrap.addresses), "announce": ("/ip4/127.0.0.1/tcp/1",)}
    first, second = [await start(**unreachable) for _ in range(2)]  # these two cannot dial each other
    await announce_until_received(first, [second], b"through the bootstrap node")
    assert [peer.peer_id for peer in await second.connected_peers()] == [bootstrap.peer_id]
    assert await second.members() == []
    await eventually(lambda: second.state.state is SwarmPhase.STANDALONE)


async def test_bootstrap_nodes_share_one_directory(start):
    first = await start(run_id=None)
    second = await start(run_id=None, peers=tuple(first.addresses))
    await eventually(second.connected_peers)
    nodes = [await start(peers=tuple(bootstrap.addresses)) for bootstrap in (first, second)]
    for node in nodes:
        await eventually(lambda node=node: node.state.state is SwarmPhase.CONNECTED)
    waiting = asyncio.create_task(first.run_until_closed())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await first.close()
    await asyncio.wait_for(waiting, 30)


async def test_a_node_without_peers_waits_to_be_dialed(start):
    first = await start()
    await eventually(lambda: first.state.state is SwarmPhase.STANDALONE)
    assert "no peers were given" in first.state.reason
    second = await start(peers=tuple(first.addresses))
    await eventually(lambda: first.state.state is second.state.state is SwarmPhase.CONNECTED)
    await second.close()
    await eventually(lambda: first.state.state is SwarmPhase.STANDALONE)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
async def test_p2pd_is_restarted_and_messages_are_delivered_again(start, number):
    first = await start(control_timeout_s=2, stop_timeout_s=0.3, restart=ExponentialBackoff(first_s=0.1))
    second = await start(peers=tuple(first.addresses))
    await announce_until_received(first, [second], b"before")
    address, old_pid = first.addresses[0], first.process_id
    os.kill(old_pid, number)
    await eventually(lambda: first.process_id is None)
    assert first.state.state is SwarmPhase.STARTING
    assert "the network process ended" in first.state.reason
    assert not await first.announce(b"to no receiver")
    assert (await first.fetch(second.peer_id, [bytes(32)])).outcome is FetchOutcome.UNREACHABLE

    await eventually(lambda: first.state.state is SwarmPhase.CONNECTED)
    assert process_is_gone(old_pid)
    assert first.counters.restarts >= 1
    assert first.addresses == [address]
    await announce_until_received(first, [second], b"after")
    await announce_until_received(second, [first], b"also after")
    store = BodyStore(b"body")
    first.serve(store.lookup)
    assert (await second.fetch(first.peer_id, store.ids)).items == (b"body",)


async def test_closing_leaves_no_process_no_file_and_no_output(start, tmp_path, capfd):
    first = await start()
    second = await start(peers=tuple(first.addresses))
    await eventually(lambda: second.state.state is SwarmPhase.CONNECTED)
    pids = [first.process_id, second.process_id]
    async with asyncio.timeout(30):
        await asyncio.gather(first.close(), second.close())
    assert all(map(process_is_gone, pids))
    assert files_under(tmp_path) == []
    assert [announcement async for announcement in first.announcements()] == []
    assert capfd.readouterr().out == ""


async def test_a_node_starts_despite_files_of_a_killed_one(start, tmp_path):
    identity = Identity.generate()
    folder = tmp_path / identity.peer_id[-6:]
    folder.mkdir()
    for name in ("p2pd.sock", "streams.sock"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(folder / name))
    assert (await start(identity=identity)).peer_id == identity.peer_id
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "p2pd.key").stat().st_mode & 0o777 == 0o600


async def test_a_port_of_another_node_is_refused(start):
    first = await start()  # p2pd itself would share the port without an error
    with pytest.raises(UsageError, match="is taken; choose another with --listen") as raised:
        await start(listen=(first.addresses[0].split("/p2p/")[0],))
    assert raised.value.exit_code == 2


async def test_the_error_of_a_p2pd_that_does_not_start_has_cause_and_address(start, monkeypatch):
    monkeypatch.setattr("ftis_node.gossip.p2pd.process.p2pd_path", lambda: Path("/bin/false"))
    with pytest.raises(MachineError, match=r"/ip4/127.0.0.1/tcp/0: .* exit code 1.* \(2 tries\)"):
        await start()


async def test_a_p2pd_that_is_never_ready_is_stopped(start, monkeypatch):
    monkeypatch.setattr("ftis_node.gossip.p2pd.session.p2pd_arguments", lambda *args, **kwargs: ["30"])
    monkeypatch.setattr("ftis_node.gossip.p2pd.process.p2pd_path", lambda: Path("/bin/sleep"))
    with pytest.raises(MachineError, match="was not ready in 0.5 s: no output"):
        await start(start_timeout_s=0.5, stop_timeout_s=0.1)
    assert not [child for child in psutil.Process().children() if child.name() == "sleep"]


async def test_one_common_peer_joins_two_swarms_with_separate_bootstrap_nodes(start):
    bootstraps = [await start(run_id=None) for _ in range(2)]
    nodes = [await start(peers=tuple(bootstrap.addresses), check_s=0.5) for bootstrap in bootstraps]
    for node in nodes:
        await eventually(lambda node=node: node.state.state is SwarmPhase.STANDALONE)
    link = await start(peers=(*bootstraps[0].addresses, *bootstraps[1].addresses), check_s=0.5)
    await eventually(lambda: "2 other members" in link.state.reason)
    await link.close()  # the others know each other by now
    for node in nodes:
        await eventually(lambda node=node: "1 other member" in node.state.reason)
