"""The key file, ports, the folder of sockets, and the end of p2pd with its daemon."""

import asyncio
import os
import socket
import sys

import pytest

from ftis_node.errors import MachineError, UsageError
from ftis_node.files import replace_file
from ftis_node.gossip import parse_listen_address
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
from ftis_node.gossip.p2pd.config import P2pdConfig
from ftis_node.gossip.p2pd.session import open_session
from tests.gossip.helpers import settings

async def main():
    chosen = settings(Path(sys.argv[1]))
    async with open_session(P2pdConfig(settings=chosen), listen=chosen.listen_addresses) as session:
        print(session.process.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_p2pd_ends_with_a_daemon_that_is_killed(tmp_path):
    daemon = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", DAEMON, str(tmp_path)), stdout=asyncio.subprocess.PIPE
    )
    assert daemon.stdout is not None
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
