"""A swarm with a shared secret: the cipher, and an outsider that knows everything except the secret."""

import asyncio

import pytest

from ftis_node.errors import ConfigError, RecordError
from ftis_node.gossip import FetchOutcome
from ftis_node.gossip.encryption import MAX_OVERHEAD_BYTES, SecretCipher
from ftis_node.gossip.frames import Frame, write_frame
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.gossip.names import RUN_ID, RpcService, protocol, topic
from ftis_node.telemetry.secrets import read_secret
from tests.gossip.helpers import BodyStore, announce_until_received, receive
from tests.waiting import eventually

SECRET = bytes(range(32))


def test_a_payload_is_decrypted_only_in_its_context():
    cipher = SecretCipher(SECRET, run_id="r")
    sealed = cipher.encrypt(b"payload", "item", "alice", "bob")
    assert cipher.decrypt(sealed, "item", "alice", "bob") == b"payload"
    assert len(sealed) == len(b"payload") + cipher.overhead_bytes == len(b"payload") + MAX_OVERHEAD_BYTES
    assert cipher.encrypt(b"payload", "item", "alice", "bob") != sealed
    other_ciphers = (SecretCipher(SECRET, run_id="s"), SecretCipher(b"x" * 32, run_id="r"))
    contexts = ("item bob alice", "request alice bob", "item alicebob", "item alice bo b")
    attempts = [(cipher, context) for context in contexts] + [(other, "item alice bob") for other in other_ciphers]
    for opener, context in attempts:
        with pytest.raises(RecordError, match="sealed"):
            opener.decrypt(sealed, *context.split())
    for damaged in (b"", sealed[:20], sealed[:-1], bytes([sealed[0] ^ 1]) + sealed[1:]):
        with pytest.raises(RecordError, match="sealed"):
            cipher.decrypt(damaged, "item", "alice", "bob")


def test_the_name_on_the_wire_depends_on_the_secret_and_is_a_valid_run_id():
    names = {SecretCipher(secret, run_id=run).wire_name(run) for secret in (SECRET, b"x" * 32) for run in ("r", "s")}
    assert len(names) == 4
    assert all(RUN_ID.fullmatch(name) for name in names)


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        (b"s" * 32, 0o600, None),
        (SECRET.hex().encode() + b"\n", 0o600, None),
        (SECRET.hex().encode()[:62], 0o600, "holds 31 bytes"),
        (b"", 0o600, "holds 0 bytes"),
        (b"s" * 32, 0o640, "chmod 600"),
    ],
)
def test_a_secret_file_must_be_long_enough_and_private(tmp_path, content, mode, problem):
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    if problem is None:
        assert len(read_secret(path, name="swarm.secret_file")) == 32
    else:
        with pytest.raises(ConfigError, match=problem):
            read_secret(path, name="swarm.secret_file")
    with pytest.raises(ConfigError, match="openssl rand"):
        read_secret(tmp_path / "none", name="swarm.secret_file")


@pytest.mark.asyncio
async def test_members_exchange_groups_and_an_outsider_gets_none(start):
    store = BodyStore(b"a confidential body")
    alice = await start(secret=SECRET)
    alice.serve(store.lookup)
    bob, outsider, wrong_secret = [
        await start(secret=secret, peers=tuple(alice.addresses)) for secret in (SECRET, None, b"x" * 32)
    ]
    await announce_until_received(alice, [bob], b"an announcement")
    assert (await bob.fetch(alice.peer_id, store.ids)).items == tuple(store.bodies.values())
    assert await bob.confirm(alice.peer_id, store.ids)
    assert await bob.publish_record(b"bob's record", ttl_s=60)
    await eventually(lambda: _has_record(alice, bob, b"bob's record"))
    assert (await outsider.fetch(alice.peer_id, store.ids)).outcome is FetchOutcome.UNREACHABLE
    assert await outsider.get_record(bob.peer_id) is None
    await eventually(lambda: wrong_secret.state.state == "standalone")
    assert "swarm.secret_file" in wrong_secret.state.reason
    assert "secret_file" not in outsider.state.reason
    await _attack_by_name(outsider, alice, bob, store)


async def _has_record(reader: Libp2pGossip, owner: Libp2pGossip, value: bytes) -> bool:
    return await reader.get_record(owner.peer_id) == value


async def _attack_by_name(outsider: Libp2pGossip, alice: Libp2pGossip, bob: Libp2pGossip, store: BodyStore) -> None:
    """Attack with the run's name on the wire, which p2pd reports to any connected peer."""
    name, session = alice._run_name, outsider._supervisor.session
    async with session.client.subscribe(topic(name, 0)) as messages:
        receiving = asyncio.ensure_future(anext(messages))
        while not receiving.done():  # gossipsub loses messages before its mesh is complete
            await alice.announce(b"not for outsiders")
            await asyncio.wait({receiving}, timeout=0.5)
        intercepted = receiving.result()
        assert b"not for outsiders" not in intercepted.payload
        num_refused = bob.counters.announcements_refused
        for forged in (b"forged", intercepted.payload):  # the second repeats alice's message under another sender
            await session.client.publish(topic(name, 0), forged)
        await eventually(lambda: bob.counters.announcements_refused == num_refused + 2)
    async with session.client.stream(alice.peer_id, protocol(name, RpcService.FETCH), timeout_s=30) as (reader, writer):
        await write_frame(writer, Frame.REQUEST, b"".join(store.ids), idle_s=5)
        assert await asyncio.wait_for(reader.read(), 30) == b""
    await eventually(lambda: alice.counters.serve_errors.get("sealed") == 1)
    await alice.announce(b"still here")
    assert (await receive(bob, b"still here")).sender == alice.peer_id
