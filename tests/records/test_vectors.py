"""This implementation reads `proto/vectors.json`, with which other implementations test their readers."""

import json
from typing import Any

import numpy as np
import pytest

from ftis_node.errors import RecordError
from ftis_node.records.codec import CODECS, unpack_any
from ftis_node.records.envelope import open_announcement, open_envelope
from ftis_node.records.group import Group

from .make_vectors import VECTORS, batches, refused, valid

STORED: dict[str, Any] = json.loads(VECTORS.read_text())


def test_the_file_is_up_to_date_with_its_script():
    """Compressed bytes and their ids may differ, because they depend on the version of zstd."""
    assert STORED["refused"] == refused()
    assert STORED["batches"] == batches()
    for old, new in zip(STORED["valid"], json.loads(json.dumps(valid())), strict=True):
        differ = {"envelope", "id"} if old["codec"] in ("lossless", "lossy") else set()
        assert {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)} <= differ


def test_every_codec_has_a_vector():
    assert [vector["codec"] for vector in STORED["valid"]] == [*CODECS, "text"]


@pytest.mark.parametrize("vector", STORED["valid"], ids=lambda vector: vector["codec"])
def test_a_valid_envelope_is_read(vector):
    envelope = open_envelope(bytes.fromhex(vector["envelope"]))
    assert envelope.is_signed_by(vector["sender"]) and envelope.id.hex() == vector["id"]
    group = unpack_any(envelope.body)
    assert (group.sender, list(group.rewards)) == (vector["sender"], vector["rewards"])
    if isinstance(group, Group):
        assert [completion.token_ids.tolist() for completion in group.completions] == vector["token_ids"]
        stored = [np.array(row, dtype=np.float32).tolist() for row in vector["logprobs"]]
        assert [completion.logprobs.tolist() for completion in group.completions] == stored
    else:
        assert [completion.text for completion in group.completions] == vector["texts"]
        assert [completion.num_tokens for completion in group.completions] == vector["lengths"]
        assert group.exact_group.hex() == vector["exact_group"] == STORED["valid"][0]["id"]


def test_every_group_of_a_batch_is_read():
    (vector,) = STORED["batches"]
    first = open_announcement(bytes.fromhex(vector["announcement"]))
    for one, group in zip((first, *first.more), vector["groups"], strict=True):
        assert (one.id.hex(), one.number) == (group["id"], group["number"])
        assert (one.envelope_bytes, one.num_tokens) == (group["envelope_bytes"], group["num_tokens"])
        assert round(one.created_at * 1000) == group["created_ms"]
        assert (one.tokenizer.hex(), one.policy_version) == (vector["tokenizer"], vector["policy_version"])


@pytest.mark.parametrize("vector", STORED["refused"], ids=lambda vector: vector["fault"])
def test_an_invalid_envelope_is_refused(vector):
    if vector["reason"] == "signature":
        assert not open_envelope(bytes.fromhex(vector["envelope"])).is_signed_by(STORED["valid"][0]["sender"])
        return
    with pytest.raises(RecordError) as caught:
        unpack_any(open_envelope(bytes.fromhex(vector["envelope"])).body)
    assert caught.value.reason == vector["reason"]
