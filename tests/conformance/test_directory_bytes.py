"""The directory's bytes in docs/reference/wire-format.md are those of hivemind."""

import time
from pathlib import Path

import msgpack

from ftis_node.gossip.p2pd.hivemind_bindings import DHTID, DictionaryDHTValue, MSGPackSerializer, dht_pb2
from ftis_node.gossip.wire_format import manifest_key
from tests.records import wire_example as example

PAGE = (Path(__file__).parents[2] / "docs/reference/wire-format.md").read_text()
DICTIONARY = 0x50


def test_the_page_has_the_request_for_a_manifest():
    key = DHTID.generate(manifest_key(example.RUN_ID)).to_bytes()
    request = dht_pb2.FindRequest(keys=[key]).SerializeToString()
    assert f"<!-- bytes: find -->\n    {request.hex()}\n" in PAGE


def test_a_dictionary_is_readable_without_hivemind():
    expiry = time.time() + 60
    stored = DictionaryDHTValue()
    stored.store(example.IDENTITY.peer_id, MSGPackSerializer.dumps(example.member()), expiry)
    read = msgpack.unpackb(MSGPackSerializer.dumps(stored))
    assert isinstance(read, msgpack.ExtType) and read.code == DICTIONARY
    _, latest, ((subkey, value, value_expiry),) = msgpack.unpackb(read.data)
    assert (latest, subkey, value_expiry) == (expiry, example.IDENTITY.peer_id, expiry)
    assert msgpack.unpackb(value) == example.member()
