"""The channel between a learner's hosts: which hosts connect, which messages are read, which host failed."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import NamedTuple

import msgspec
import pytest
import zmq
import zmq.asyncio
from learner_rig import make_boot

from ftis_node.config.workers import LearnerSection, parse_endpoint
from ftis_node.errors import ConfigError, ModelError, NetworkError, WorkerDiedError
from ftis_node.learner.distributed import host_agent
from ftis_node.learner.distributed import hosts as hosts_module
from ftis_node.learner.distributed.host_agent import AgentSettings, run_agent
from ftis_node.learner.distributed.host_channel import (
    Assignment,
    HostHello,
    HostKey,
    HostLeft,
    HostsEnded,
    Rejoin,
    decode_to_host,
    encode,
    interface_environment,
    own_address,
    versions,
)
from ftis_node.learner.distributed.hosts import connect_hosts
from ftis_node.learner.distributed.launch import ONE_HOST, RankAddress
from ftis_node.learner.distributed.torchrun import replacement
from ftis_node.learner.messages import HostsConnected
from ftis_node.workers.wire import Heartbeat, failure_of

SECRET = bytes(range(32))
BEAT = Heartbeat(num_in_flight=0, progress=0)
WITHIN_S = 30.0


class Left(NamedTuple):
    error: str
    at_s: float


class Emitted(list):
    """The events of a worker, and the error that ended it."""

    def __call__(self, event):
        self.append(event)

    def fail(self, error):
        self.append(error)


@pytest.fixture
def boot(model_folder, tmp_path):
    """Return a boot of two hosts that connect on the loopback interface."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET.hex())
    secret.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    section = LearnerSection(
        hosts=2, rendezvous=f"127.0.0.1:{port}", rendezvous_secret_file=str(secret), rendezvous_timeout_s=WITHIN_S
    )
    return msgspec.structs.replace(make_boot(model_folder, tmp_path), settings=section)


def port_of(boot):
    return parse_endpoint(boot.settings.rendezvous, name="")[1]


class Client:
    """Another host, whose messages the test chooses."""

    def __init__(self, port, secret=SECRET, own_keys=None):
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        HostKey(secret).secure(self.socket, as_server=False)
        if own_keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = own_keys
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    async def send(self, message):
        await self.socket.send(message if isinstance(message, bytes) else encode(message))

    async def until(self, kind):
        async with asyncio.timeout(WITHIN_S):
            while not isinstance(message := decode_to_host(await self.socket.recv()), kind):
                pass
        return message

    def close(self):
        self._context.destroy(linger=0)


@pytest.fixture
def client(boot):
    made = []

    def make(**options):
        made.append(Client(port_of(boot), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def test_a_host_without_the_secret_cannot_connect(boot, client):
    emitted = Emitted()

    async def lead():
        async with connect_hosts(boot, emitted):
            raise AssertionError("a host without the secret connected")

    leading = asyncio.create_task(lead())
    await client(secret=bytes(32)).send(HostHello("unknown", versions()))
    # The second client knows the public key of the node, but not the secret.
    await client(own_keys=zmq.curve_keypair()).send(HostHello("unknown", versions()))
    await asyncio.sleep(2.0)
    assert emitted == [HostsConnected(1, 2, boot.settings.rendezvous)]
    leading.cancel()
    await asyncio.wait([leading])


async def test_a_host_gets_its_ranks_unless_its_version_or_messages_are_invalid(boot, client):
    emitted, right, old, odd = Emitted(), client(), client(), client()
    await odd.send(b"\xc1 not a message")
    await odd.send(Rejoin())
    await old.send(HostHello("old", "ftis-node 0.0.1, torch 1.0"))
    await right.send(BEAT)
    async with asyncio.timeout(WITHIN_S):
        first = asyncio.create_task(right.until(Rejoin))  # the node has not received its greeting
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send_hello_after(first, right))
            async with connect_hosts(boot, emitted) as connected:
                connected.assign(RankAddress(0, 2, 0, "127.0.0.1", 4711))
                assigned = await right.until(Assignment)
                ended = await old.until(HostsEnded)
                leaving = tasks.create_task(leave(right))
            clean = await leaving
    assert time.monotonic() - clean.at_s < hosts_module.LEAVE_S / 2, "the node waited although all hosts had left"
    assert (assigned.number, assigned.first_rank, assigned.address, assigned.port) == (2, 1, "127.0.0.1", 4711)
    assert assigned.boot == boot
    assert "old has ftis-node 0.0.1, torch 1.0 and the node has" in ended.error
    assert clean.error == ""
    assert [event.num_connected for event in emitted] == [1, 2]


async def leave(client):
    """Reply to the end of the node, and return the error with the time."""
    ended = await client.until(HostsEnded)
    at_s = time.monotonic()
    await client.send(HostLeft())
    return Left(ended.error, at_s)


async def send_hello_after(first, client):
    await first
    await client.send(HostHello("right", versions()))


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([failure_of(ConfigError("no such model"), call_id=0)], (ConfigError, "(beta): no such model")),
        ([failure_of(WorkerDiedError("rank 1 was ended by SIGKILL"), call_id=0)], (WorkerDiedError, "rank 1 was")),
        ([], (WorkerDiedError, "host 2 of 2 of the learner (beta) is lost: no heartbeat")),
    ],
)
async def test_a_failed_host_is_named_and_the_process_ends(boot, client, monkeypatch, reports, expected):
    ended, emitted, other = asyncio.Event(), Emitted(), client()
    boot = msgspec.structs.replace(boot, settings=boot.settings.model_copy(update={"host_timeout_s": 3.0}))
    monkeypatch.setattr(hosts_module.os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(hosts_module.logging, "shutdown", lambda: None)
    await other.send(HostHello("beta", versions()))
    async with connect_hosts(boot, emitted):
        for report in reports:
            await other.send(report)
        async with asyncio.timeout(WITHIN_S):
            await ended.wait()
    error = next(each for each in emitted if isinstance(each, Exception))
    assert type(error) is expected[0]
    assert expected[1] in str(error)
    assert str(error).startswith("host 2 of 2 of the learner (beta)")


async def test_a_host_that_downloads_a_model_is_not_lost_and_reports_its_error(boot, monkeypatch):
    def download(model):
        time.sleep(6.0)
        raise ModelError("no such folder")

    ended, emitted = asyncio.Event(), Emitted()
    boot = msgspec.structs.replace(boot, settings=boot.settings.model_copy(update={"host_timeout_s": 3.0}))
    monkeypatch.setattr(hosts_module.os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(hosts_module.logging, "shutdown", lambda: None)
    monkeypatch.setattr(host_agent, "resolve_model", download)
    agent = asyncio.create_task(run_agent(AgentSettings("127.0.0.1", port_of(boot)), SECRET))
    async with connect_hosts(boot, emitted) as connected:
        connected.assign(RankAddress(0, 2, 0, "127.0.0.1", 4711))
        async with asyncio.timeout(WITHIN_S):
            await ended.wait()
    error = next(each for each in emitted if isinstance(each, Exception))
    assert (type(error), str(error).partition(": ")[2]) == (ModelError, "no such folder")
    with pytest.raises(ModelError, match="no such folder"):
        await agent


async def test_the_error_for_missing_hosts_has_the_command_that_starts_them(boot):
    boot = msgspec.structs.replace(boot, settings=boot.settings.model_copy(update={"rendezvous_timeout_s": 0.5}))
    with pytest.raises(NetworkError, match=r"1 of 2 hosts after 0.5 s: start `ftis-node learner-host --rendezvous 127"):
        async with connect_hosts(boot, Emitted()):
            pass


async def test_an_agent_without_a_node_ends_with_an_error(boot):
    settings = AgentSettings("127.0.0.1", port_of(boot), timeout_s=1.0)
    with pytest.raises(NetworkError, match="no node answers at 127.0.0.1"):
        await run_agent(settings, SECRET)


async def test_one_host_needs_no_channel(boot, tmp_path):
    alone = msgspec.structs.replace(boot, settings=LearnerSection())
    async with connect_hosts(alone, Emitted()) as connected:
        assert connected is ONE_HOST


def test_gloo_and_nccl_use_the_interface_of_the_rendezvous():
    assert own_address("127.0.0.1", 1) == "127.0.0.1"
    assert interface_environment("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    with pytest.raises(NetworkError, match=r"no interface of this host has the address 192\.0\.2\.1"):
        interface_environment("192.0.2.1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10.0.0.1:29400", ("10.0.0.1", 29400)), ("[fd00::1]:1", ("fd00::1", 1)), ("a.b.svc:65535", ("a.b.svc", 65535))],
)
def test_endpoints_are_parsed(text, expected):
    assert parse_endpoint(text, name="x") == expected


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:0", "host:65536", "fd00::1:1", "0.0.0.0:1", "*:1", "[::]:1"]
)
def test_invalid_endpoints_are_refused(text):
    with pytest.raises(ValueError, match=r"^x is "):
        parse_endpoint(text, name="x")


def torchruns(**changes):
    """Return the environment that torchrun sets for the single process of a host."""
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1"}
    return given | {"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True", "HOME": "/root"} | changes


def test_torchrun_starts_the_node_on_the_first_host_and_a_learner_host_on_the_others():
    given = ["--secret-file", "s", "join", "--model", "m", "--steps", "3"]
    arguments, environment = replacement(given, torchruns())
    assert arguments == ["join", "--model", "m", "--steps", "3"]
    assert environment == {
        "HOME": "/root",
        "FTIS_LEARNER__HOSTS": "2",
        "FTIS_LEARNER__RENDEZVOUS": "10.0.0.1:29400",
        "FTIS_LEARNER__RENDEZVOUS_SECRET_FILE": "s",
    }
    arguments, environment = replacement(["--", "--port", "1", *given], torchruns(RANK="1", MASTER_ADDR="fd00::1"))
    assert arguments == ["learner-host", "--rendezvous", "[fd00::1]:1", "--secret-file", "s"]
    assert environment == {"HOME": "/root"}


@pytest.mark.parametrize(
    ("arguments", "changes", "problem"),
    [
        (["--secret-file", "s", "join"], {"LOCAL_WORLD_SIZE": "4"}, "--nproc-per-node 1: learner.processes sets"),
        (["--secret-file", "s", "status"], {}, "the command of the first host must follow"),
        (["join"], {}, "--secret-file"),
    ],
)
def test_invalid_arguments_under_torchrun_are_explained(arguments, changes, problem, capsys):
    with pytest.raises(SystemExit) as ended:
        replacement(arguments, torchruns(**changes))
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["rendezvous", "rendezvous_secret_file"])
def test_several_hosts_need_an_address_and_a_secret(missing):
    given = {"hosts": 2, "rendezvous": "10.0.0.1:1", "rendezvous_secret_file": "s"}
    assert LearnerSection(**given, processes=4).num_ranks == 8
    del given[missing]
    with pytest.raises(ValueError, match=f"needs learner.{missing}: set it, or hosts = 1"):
        LearnerSection(**given)
