"""Answers to requests of peers, which may be many and cost them nothing."""

import asyncio
import threading

from ftis_node.node.peers.group_requests import PeerRequestHandler
from ftis_node.swarm.lru import ENTRY_BYTES, LruBytes
from tests.node.light_swarm import LightSwarm, manifest_of


async def test_a_group_is_encoded_as_text_once_and_outside_the_event_loop(tmp_path, monkeypatch):
    threads = list[threading.Thread]()

    def encode(handler, data):
        threads.append(threading.current_thread())
        return b"text of " + data[:4] if len(threads) == 1 else b""

    monkeypatch.setattr(PeerRequestHandler, "_encode_as_text", encode)
    swarm = LightSwarm(tmp_path, manifest_of(other_tokenizers="text"))
    async with swarm.node(1) as alice:
        await swarm.publish(alice, 2)
        ids, served = alice.parts.store.reader.own_ready(), alice.wiring.served
        answers = await asyncio.gather(*(served.encode_as_text([*ids, bytes(32)]) for _ in range(3)))
        assert [list(map(len, answer)) for answer in answers] == [[12]] * 3, "the second has no text"
        assert len(threads) == 2 and threading.current_thread() not in threads


def test_a_cache_of_bytes_drops_the_oldest_values():
    cache = LruBytes[str](2 * ENTRY_BYTES + 10)
    for key, size in (("a", 5), ("b", 5), ("a", 4), ("c", 6), ("d", 999)):
        cache[key] = bytes(size)
        if key == "c":
            assert [cache.get(one) for one in "abc"] == [bytes(4), None, bytes(6)]
    assert [cache.get(one) for one in "abcd"] == [None] * 4
