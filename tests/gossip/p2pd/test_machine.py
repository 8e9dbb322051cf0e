"""The process p2pd: its files, ports and end; cancellation of calls to it; imports of hivemind without torch."""

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from ftis_node.errors import MachineError, UsageError
from ftis_node.files import replace_file
from ftis_node.gossip import parse_listen_address
from ftis_node.gossip.p2pd.client import cancel_and_wait, shielded_call
from ftis_node.gossip.p2pd.process import P2pdProcess, check_free, libp2p_private_key, p2pd_arguments, pin_ports
from ftis_node.gossip.p2pd.session import prepare_sockets
from ftis_node.records.identity import Identity
from tests.gossip.helpers import process_is_gone, settings
from tests.waiting import eventually


def test_the_key_file_contains_seed_and_public_key():
    assert libp2p_private_key(Identity.from_seed(bytes(range(32)))).hex() == (
        "08011240"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    )


@pytest.mark.parametrize("address", ["/ip4/127.0.0.1/tcp/{}", "/ip4/127.0.0.1/udp/{}/quic-v1"])
def test_a_port_is_free_after_the_check(address):
    kind = socket.SOCK_STREAM if "/tcp/" in address else socket.SOCK_DGRAM
    with socket.socket(type=kind) as unused:
        unused.bind(("127.0.0.1", 0))
        bound = unused.getsockname()
        with pytest.raises(UsageError):
            check_free([parse_listen_address(address.format(bound[1]))])
    check_free([parse_listen_address(address.format(bound[1]))])
    with socket.socket(type=kind) as p2pd:
        p2pd.bind(bound)
        assert p2pd.getsockname() == bound


def test_a_port_shared_by_so_reuseport_is_taken():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} is taken"):
            check_free([parse_listen_address(f"/ip4/127.0.0.1/tcp/{port}")])


def test_a_restarted_node_keeps_its_ports():
    requested = [parse_listen_address(text) for text in ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0", "/ip4/0.0.0.0/tcp/7")]
    actual = ["/ip4/10.0.0.1/tcp/4001", "/ip4/10.0.0.1/udp/9/quic-v1", "/ip6/::1/tcp/4002"]
    pinned = [address.text for address in pin_ports(requested, actual)]
    assert pinned == ["/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4002", "/ip4/0.0.0.0/tcp/7"]


def test_the_folder_of_sockets_is_private_and_other_files_are_kept(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    for name in ("p2pd.sock", "streams.sock", "p2pd.key", "other"):
        (folder / name).touch()
    prepare_sockets(folder)
    assert [path.name for path in folder.iterdir()] == ["other"]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    with pytest.raises(UsageError, match="too long for a unix socket"):
        prepare_sockets(tmp_path / ("x" * 100))


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(UsageError, match="sockets"):
        prepare_sockets(tmp_path / "run")


DAEMON = """
import asyncio, sys
from pathlib import Path
from ftis_node.gossip.p2pd.session import open_session
from ftis_node.gossip.session_parts import SessionParts
from tests.gossip.helpers import settings

async def main():
    chosen = settings(Path(sys.argv[1]))
    async with open_session(SessionParts(settings=chosen), listen=chosen.listen_addresses) as session:
        print(session.process.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_p2pd_ends_with_a_daemon_that_is_killed(tmp_path):
    daemon = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", DAEMON, str(tmp_path)), stdout=asyncio.subprocess.PIPE
    )
    pid = int(await daemon.stdout.readline())
    assert not process_is_gone(pid)
    daemon.kill()
    await daemon.wait()
    try:
        await eventually(lambda: process_is_gone(pid), within_s=20)
    finally:
        if not process_is_gone(pid):
            os.kill(pid, 9)


async def test_p2pd_ends_by_itself_if_no_daemon_connects(tmp_path):
    replace_file(tmp_path / "key", libp2p_private_key(Identity.generate()), mode=0o600)
    arguments = p2pd_arguments(
        settings(tmp_path, start_timeout_s=1.0),
        listen=[parse_listen_address("/ip4/127.0.0.1/tcp/0")],
        control_path=tmp_path / "control",
        key_path=tmp_path / "key",
        is_public=False,
    )
    process = await P2pdProcess.start(arguments, timeout_s=30)
    try:
        async with asyncio.timeout(20):
            await process.ended()
    finally:
        await process.stop(timeout_s=0)


async def test_the_error_names_a_p2pd_that_cannot_be_executed(tmp_path, monkeypatch):
    program = tmp_path / "p2pd"
    program.write_bytes(b"")
    monkeypatch.setattr("ftis_node.gossip.p2pd.process.p2pd_path", lambda: program)
    with pytest.raises(MachineError, match=f"{program} cannot be started: Permission denied; install hivemind again"):
        await P2pdProcess.start([], timeout_s=1)


class LosesCancellations:
    """Work that loses its first cancellations, as `asyncio.wait_for` may."""

    def __init__(self, num_lost: int) -> None:
        self.num_left = num_lost
        self.has_ended = False

    async def work(self) -> str:
        try:
            while True:
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    if not self.num_left:
                        raise
                    self.num_left -= 1
        finally:
            self.has_ended = True


async def test_a_cancelled_caller_ends_at_once():
    stub = LosesCancellations(1)
    waiting = asyncio.create_task(shielded_call(stub.work(), timeout_s=30))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 30)
    assert not stub.has_ended
    (remaining,) = asyncio.all_tasks() - {asyncio.current_task()}
    await cancel_and_wait(remaining)


async def test_a_call_times_out_or_returns_its_result_or_raises_its_error():
    stub = LosesCancellations(0)
    with pytest.raises(TimeoutError):
        await shielded_call(stub.work(), timeout_s=0.01)
    await asyncio.sleep(0)
    assert stub.has_ended

    async def call(result):
        if not result:
            raise ValueError("no result")
        return result

    assert await shielded_call(call("yes"), timeout_s=5) == "yes"
    with pytest.raises(ValueError, match="no result"):
        await shielded_call(call(""), timeout_s=5)


async def test_tasks_that_lose_a_cancellation_are_cancelled_until_they_end(monkeypatch):
    monkeypatch.setattr("ftis_node.gossip.p2pd.client.CANCEL_AGAIN_S", 0.01)
    works = [LosesCancellations(0), LosesCancellations(3)]
    tasks = [asyncio.create_task(each.work()) for each in works]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await cancel_and_wait(*tasks)
    assert [(each.has_ended, each.num_left) for each in works] == [(True, 0), (True, 0)]


BINDINGS = "from ftis_node.gossip.p2pd.hivemind_bindings import DHTNode, P2P, PeerID\n"
WHOLE = """
import hivemind
assert hivemind.DHT is not None and hivemind.Optimizer is not None
from hivemind import dht, p2p, utils
assert p2p.PeerID is PeerID and dht.DHTNode is DHTNode and dht.DHT is hivemind.DHT
assert utils.MPFuture is not None
"""
IS_TORCH_LOADED = "import sys; print('torch' in sys.modules, 'hivemind' in sys.modules)\n"


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_p2p_and_dht_are_imported_without_torch():
    assert _run(BINDINGS + IS_TORCH_LOADED) == "False False"


def test_all_of_hivemind_can_be_imported_afterwards():
    assert _run(BINDINGS + WHOLE + IS_TORCH_LOADED) == "True True"
