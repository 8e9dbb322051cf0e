"""Frames: the limits of size and time, with input made by hand."""

import asyncio

import pytest

from ftis_node.errors import RecordError
from ftis_node.gossip import GossipCounters, GossipLimits
from ftis_node.gossip.frames import CHUNK_BYTES, ItemCollector, read_frame, unpack_ids
from ftis_node.gossip.names import RpcService
from ftis_node.gossip.services import Services
from tests.loop_clock import LoopClock

LIMITS = GossipLimits(max_ids_per_request=3)


def _stream(data: bytes, *, is_over: bool = False) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    if is_over:
        reader.feed_eof()
    return reader


async def test_a_length_of_4_gib_is_refused_before_the_body_is_read():
    reader = _stream(b"\x02\xff\xff\xff\xff")
    with pytest.raises(RecordError, match="4294967295 bytes") as raised:
        await read_frame(reader, max_bytes=1 << 20, idle_s=1)
    assert raised.value.reason == "frame_size"


@pytest.mark.parametrize("data", [b"", b"\x02\0", b"\x02\0\0\0\x03ab"], ids=["nothing", "half a header", "half a body"])
async def test_a_silent_stream_times_out_after_the_idle_limit(data):
    with pytest.raises(TimeoutError):
        await read_frame(_stream(data), max_bytes=9, idle_s=0.05)


async def test_an_incomplete_frame_at_the_end_of_a_stream_is_an_error():
    with pytest.raises(EOFError):
        await read_frame(_stream(b"\x02\0\0\0\x03ab", is_over=True), max_bytes=9, idle_s=1)


async def test_a_long_body_over_a_slow_connection_does_not_time_out(monkeypatch):
    reader = _stream(b"\x02" + (3 * CHUNK_BYTES).to_bytes(4, "big"))
    clock = LoopClock(monkeypatch)
    reading = asyncio.create_task(read_frame(reader, max_bytes=3 * CHUNK_BYTES, idle_s=0.4))
    for _ in range(3):
        await clock.advance(0.3)
        reader.feed_data(bytes(CHUNK_BYTES))
    assert (await reading)[1] == bytes(3 * CHUNK_BYTES)


def test_a_repeated_id_counts_once():
    first, second = bytes(32), bytes([1]) * 32
    assert unpack_ids(first + second + first, limits=LIMITS) == [first, second]


@pytest.mark.parametrize("packed", [b"", bytes(31), bytes(33), bytes(32 * 4)])
def test_a_wrong_number_or_length_of_ids_is_refused(packed):
    with pytest.raises(RecordError) as raised:
        unpack_ids(packed, limits=LIMITS)
    assert raised.value.reason == "ids"


async def test_one_envelope_at_a_time_is_looked_up():
    batches = []

    async def lookup(ids):
        batches.append(len(ids))
        return ids

    ids = [bytes([number]) * 32 for number in range(3)]
    services = Services(limits=LIMITS, counters=GossipCounters())
    services.lookup = lookup
    assert [body async for body in services.handlers[RpcService.FETCH]("peer", b"".join(ids))] == ids
    assert batches == [1, 1, 1]


def test_the_items_of_a_pull_are_bounded_in_number_and_bytes():
    pull = ItemCollector(max_items=3, max_item_bytes=10, max_bytes=15)
    pull.add(bytes(10))
    assert pull.next_max_bytes == 5
    with pytest.raises(RecordError, match="6 bytes"):
        pull.add(bytes(6))
    pull.add(bytes(5))
    pull.add(b"")
    with pytest.raises(RecordError, match="more than the 3 requested items"):
        pull.add(b"")
