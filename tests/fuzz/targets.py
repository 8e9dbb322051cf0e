"""All targets by name: readers of bytes from peers, and chains of the loops behind them.

A reader returns a value or refuses the bytes with a known reason. A chain passes the items of a case through a node.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from ftis_node.errors import RecordError
from ftis_node.gossip import GossipLimits
from ftis_node.gossip.directory import entries
from ftis_node.gossip.frames import read_frame, unpack_ids
from ftis_node.records.codec import CODECS, pack_group, pack_text_group, unpack_any
from ftis_node.records.envelope import (
    Announcement,
    PeerRecord,
    open_announcement,
    open_envelope,
    open_peer_record,
    seal_group,
    seal_peer_record,
)
from tests.conftest import make_group, make_text_group
from tests.fuzz.chains import announcements, directory, http, records, serving, training, weights
from tests.fuzz.fuzzed_node import HOSTILE, MADE_AT, RUN
from tests.fuzz.mutator import split

RECORD_REASONS = {"size", "parse", "version", "codec", "malformed", "signature"}
STREAM_REASONS = {"frame_kind", "frame_size", "ids"}
LIMITS = GossipLimits()
CHAINS = {
    module.__name__.rpartition(".")[2]: module
    for module in (announcements, records, directory, training, serving, weights, http)
}


class Target(NamedTuple):
    """Code under test. `run` raises an exception if the code is wrong. `kinds` returns the message type of an item."""

    run: Callable[[bytes], None]
    seeds: Sequence[bytes]
    kinds: Callable[[int], type | None] | None = None


def _reads(read: Callable[[bytes], object], allowed: set[str], *seeds: bytes) -> Target:
    def run(data: bytes) -> None:
        try:
            read(data)
        except RecordError as error:
            assert error.reason in allowed, error.reason

    return Target(run, seeds)


def _read_envelope(data: bytes) -> object:
    return unpack_any(open_envelope(data).body)


def _read_ids(data: bytes) -> object:
    return unpack_ids(data, limits=LIMITS)


def _read_entry(data: bytes) -> object:
    found = entries.verify_entry(data, max_record_bytes=LIMITS.max_record_bytes)
    return found and (found.key, found.subkey, entries.unpack_addresses(found.payload))


def _read_frames(data: bytes) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        while not reader.at_eof():
            await read_frame(reader, max_bytes=LIMITS.max_envelope_bytes, idle_s=1.0)

    try:
        _runner().run(read())
    except asyncio.IncompleteReadError:
        return


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


def _readers() -> dict[str, Target]:
    sender = HOSTILE[0]
    group = make_group(sender, run_id=RUN.run_id, created_at=MADE_AT)
    text_group = make_text_group(sender, run_id=RUN.run_id, created_at=MADE_AT)
    envelopes = [seal_group(group, sender, codec=codec).to_bytes() for codec in CODECS]
    bodies = [pack_group(group, codec=codec) for codec in CODECS]
    announced = Announcement(bytes(32), 1, 100, 5, bytes(8), 3, MADE_AT).to_bytes()
    record = PeerRecord(RUN.run_id, sender.peer_id, "n", "m", 1, "0" * 32, "full", 1, 1, 1.0, MADE_AT, "1")
    address = b"/ip4/1.2.3.4/tcp/1\n"
    sealed = [entries.sign_entry(sender, kind, RUN.run_id, address, expires_at=1e9) for kind in entries.EntryKind]
    return {
        "envelope": _reads(_read_envelope, RECORD_REASONS, *envelopes, seal_group(text_group, sender).to_bytes()),
        "body": _reads(unpack_any, RECORD_REASONS, *bodies, pack_text_group(text_group)),
        "announcement": _reads(open_announcement, RECORD_REASONS, announced),
        "peer_record": _reads(open_peer_record, RECORD_REASONS, seal_peer_record(record, sender)),
        "ids": _reads(_read_ids, STREAM_REASONS, bytes(32), bytes(range(64))),
        "entry": _reads(_read_entry, set(), *sealed),
        "frames": _reads(_read_frames, STREAM_REASONS, b"\x01\0\0\0\x02hi\x03\0\0\0\0", b"\x02\xff\xff\xff\xff"),
    }


def _chain(name: str) -> Target:
    module = CHAINS[name]
    return Target(lambda data: _runner().run(module.chain(split(data))), module.seeds(), module.kinds)


READERS = _readers()
TARGETS: dict[str, Target] = READERS | {name: _chain(name) for name in CHAINS}
