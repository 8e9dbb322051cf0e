"""The stream server: admission, slots, and streams that are open or accepted while it closes."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from ftis_node.gossip import GossipCounters, GossipLimits
from ftis_node.gossip.frames import Frame, read_frame, write_frame
from ftis_node.gossip.names import RpcService, protocol
from ftis_node.gossip.p2pd.hivemind_bindings import p2pd_pb2, write_pbmsg
from ftis_node.gossip.services import AdmissionControl, OverBudget
from ftis_node.gossip.session_parts import SessionParts
from ftis_node.gossip.streams import StreamServer
from ftis_node.records.identity import Identity
from tests.gossip.helpers import settings
from tests.waiting import eventually

HELLO = protocol("r", RpcService.HELLO)
ONE_EACH = GossipLimits(max_streams_per_peer=1)
ANN, BOB = Identity.from_seed(bytes([1]) * 32), Identity.from_seed(bytes([2]) * 32)


async def hello(peer_id: str, payload: bytes) -> AsyncGenerator[bytes, None]:
    yield b"hello"


@asynccontextmanager
async def serving(
    path: Path, admission: AdmissionControl, counters: GossipCounters, limits: GossipLimits = ONE_EACH
) -> AsyncIterator[None]:
    given = {"limits": limits, "counters": counters, "admission": admission, "handlers": {HELLO: hello}}
    server = StreamServer(SessionParts(settings=settings(path.parent), **given))
    await server.listen(path)
    try:
        yield
    finally:
        await server.close()


async def silent_stream(path: Path, peer: bytes) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_unix_connection(str(path))
    await write_pbmsg(writer, p2pd_pb2.StreamInfo(peer=peer, addr=b"", proto=HELLO))
    return writer


async def request(path: Path, peer: bytes) -> list[Frame]:
    """Return the frames of the answer to a peer, on a stream in p2pd's form; none if the server closes it."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    frames: list[Frame] = []
    with suppress(EOFError, ConnectionError):
        await write_pbmsg(writer, p2pd_pb2.StreamInfo(peer=peer, addr=b"", proto=HELLO))
        await write_frame(writer, Frame.REQUEST, b"", idle_s=10)
        while not frames or frames[-1] is Frame.ITEM:
            frames.append((await read_frame(reader, max_bytes=100, idle_s=10))[0])
    writer.close()
    return frames


async def test_a_slot_is_released_after_each_answer(tmp_path):
    counters = GossipCounters()
    async with serving(tmp_path / "s", AdmissionControl(ONE_EACH), counters):
        assert [await request(tmp_path / "s", ANN.peer) for _ in range(8)] == [[Frame.ITEM, Frame.END]] * 8
    assert counters.serve_errors == {}


async def test_a_refused_peer_is_not_served_and_another_is(tmp_path):
    counters, admission = GossipCounters(), AdmissionControl(GossipLimits())
    admission.is_refused = lambda peer_id: peer_id == ANN.peer_id
    async with serving(tmp_path / "s", admission, counters):
        assert await request(tmp_path / "s", ANN.peer) == []
        assert await request(tmp_path / "s", BOB.peer) == [Frame.ITEM, Frame.END]
    assert counters.serve_errors == {"refused": 1}


async def test_excess_streams_of_a_peer_get_busy_or_are_closed_and_later_requests_are_served(tmp_path):
    """Silent streams: the peer may hold two, the server keeps eight, and closes the others."""
    counters, limits = GossipCounters(), GossipLimits(max_streams_per_peer=2)
    async with serving(tmp_path / "s", AdmissionControl(limits), counters, limits):
        writers = [await silent_stream(tmp_path / "s", ANN.peer) for _ in range(12)]
        await eventually(lambda: counters.serve_errors == {"busy": 6, "flood": 4})
        assert await request(tmp_path / "s", ANN.peer) == []
        assert await request(tmp_path / "s", BOB.peer) == [Frame.ITEM, Frame.END]
        for writer in writers:
            writer.close()
        await eventually(lambda: counters.serve_errors["broken"] == 8)
        assert await request(tmp_path / "s", ANN.peer) == [Frame.ITEM, Frame.END]


async def test_silent_streams_of_new_peers_leave_slots_to_known_peers(tmp_path):
    """They hold at most three quarters of the served streams, and of those that wait for BUSY."""
    counters, limits = GossipCounters(), GossipLimits(max_streams=4, max_streams_per_peer=1)
    admission = AdmissionControl(limits)
    admission.is_new = lambda peer_id: peer_id != ANN.peer_id
    async with serving(tmp_path / "s", admission, counters, limits):
        strangers = [Identity.from_seed(bytes([seed]) * 32).peer for seed in range(10, 26)]
        writers = [await silent_stream(tmp_path / "s", peer) for peer in strangers]
        await eventually(lambda: counters.serve_errors["busy"] == 9)
        assert await request(tmp_path / "s", ANN.peer) == [Frame.ITEM, Frame.END]
        assert counters.serve_errors == {"busy": 9, "flood": 4}
        for writer in writers:
            writer.close()


async def test_a_new_peer_that_becomes_known_meanwhile_releases_the_slots_that_it_took():
    admission, new = AdmissionControl(GossipLimits(max_streams=2)), {ANN.peer_id, BOB.peer_id}
    admission.is_new = lambda peer_id: peer_id in new
    with admission.admitted(ANN.peer_id, RpcService.FETCH):
        new.remove(ANN.peer_id)
        with admission.admitted(ANN.peer_id, RpcService.FETCH):
            pass
        with pytest.raises(OverBudget), admission.admitted(BOB.peer_id, RpcService.FETCH):
            raise AssertionError("the slot for new peers is taken")
    with admission.admitted(BOB.peer_id, RpcService.FETCH):
        assert admission._streams.num_held(BOB.peer_id) == 1


async def test_a_peer_with_a_key_of_another_type_is_not_served(tmp_path):
    counters = GossipCounters()
    async with serving(tmp_path / "s", AdmissionControl(GossipLimits()), counters):
        assert await request(tmp_path / "s", b"\x12\x20" + bytes(32)) == []
    assert counters.non_ed25519 == {"stream": 1}


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_stream_that_arrives_while_the_server_closes_is_closed(tmp_path, num_turns):
    """After `num_turns` of the event loop the stream is not yet accepted, being accepted, or served."""
    server = StreamServer(SessionParts(settings=settings(tmp_path)))
    await server.listen(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(tmp_path / "s"))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await server.close()
        for _ in range(8):
            await asyncio.sleep(0)
        caller.setblocking(False)
        with suppress(ConnectionResetError):  # a stream that was not accepted
            assert caller.recv(1) == b""
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "gossip-serve"]
