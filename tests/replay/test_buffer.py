"""The buffer on disk: admission, taking groups for a step, reading. Also the public names of the package."""

import sqlite3
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ftis_node
from ftis_node.config.home import Home
from ftis_node.errors import ConfigError, DamagedError, RecordError
from ftis_node.records.codec import unpack_any, unpack_group
from ftis_node.records.envelope import seal_group
from ftis_node.records.group import PromptRef
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.group_history import PromptResolver
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.stored_rows import StoredGroup
from ftis_node.validation import Accepted
from tests.conftest import PROMPT_IDS, accept, fill_buffer, make_group, make_text_group

ME = Identity.from_seed(bytes([1]) * 32)
ANN = Identity.from_seed(bytes([2]) * 32)
BOB = Identity.from_seed(bytes([3]) * 32)


def accepted(identity: Identity, number: int, **changes: object) -> Accepted:
    return accept(make_group(identity, number=number, **changes), identity)


def fill(buffer: ReplayBuffer, *, own: int, ann: int = 0, bob: int = 0) -> None:
    for identity, count in ((ME, own), (ANN, ann), (BOB, bob)):
        for number in range(1, count + 1):
            assert buffer.admit(accepted(identity, number), own=identity is ME)


def test_a_group_is_admitted_once(buffer, reader):
    first = accepted(ANN, 1)
    assert buffer.admit(first, own=False)
    assert not buffer.admit(first, own=False)
    assert not buffer.admit(accepted(ANN, 1, created_at=1.0), own=False), "another body with the same number"
    assert reader.is_known(first.envelope.id)
    assert reader.has_number(ANN.peer_id, 1)
    assert not reader.has_number(ANN.peer_id, 2)
    assert reader.ready_counts() == (0, 1)


def test_a_step_takes_admitted_groups_unchanged(buffer):
    fill(buffer, own=3, ann=2)
    taken = buffer.take(1, own=2, foreign=1).groups
    assert [group.own for group in taken] == [True, True, False]
    assert [group.number for group in taken] == [1, 2, 2], "own: oldest first; foreign: newest first"
    assert taken[0].prompt_ids == np.array(PROMPT_IDS, dtype="<i4").tobytes()
    assert taken[0].rewards == (1.0, 0.0)
    assert first_ids(taken[0]) == [10, 11, 2]


def first_ids(stored: StoredGroup) -> list[int]:
    return unpack_group(stored.body).completions[0].token_ids.tolist()


def test_a_text_group_is_read_with_the_tokens_of_its_validation(path, buffer, reader):
    as_text = accept(make_text_group(ANN), ANN, [[10, 2], [7, 8, 9]])
    fill_buffer(path, as_text, accepted(BOB, 1))
    again, exact = sorted(buffer.take(1, own=0, foreign=2).groups, key=lambda taken: taken.sender != ANN.peer_id)
    assert again.text_token_ids == ((10, 2), (7, 8, 9))
    in_tokens = unpack_any(again.body).in_tokens(again.text_token_ids)
    assert in_tokens == as_text.group
    assert [completion.mean_logprob for completion in in_tokens.completions] == [-0.25, -2.0]
    assert [len(completion.logprobs) for completion in in_tokens.completions] == [0, 0]
    assert (in_tokens.policy_version, in_tokens.policy_version_newest) == (3, 4)
    assert exact.text_token_ids == ()
    assert unpack_group(exact.body).mean_logprobs == ()
    assert reader.envelopes([as_text.envelope.id]) == [as_text.envelope_bytes], "the envelope is stored as received"
    assert again.rewards == (1.0, 0.0)


def test_no_group_is_taken_twice(buffer, reader):
    fill(buffer, own=4)
    first = {group.id for group in buffer.take(1, own=3, foreign=0).groups}
    second = {group.id for group in buffer.take(2, own=3, foreign=0).groups}
    assert (len(first), len(second)) == (3, 1)
    assert not first & second
    assert buffer.release_step(1, ReleaseReason.TRAINED) == 3
    assert not buffer.take(3, own=9, foreign=9).groups
    assert (reader.figures().released, reader.figures().trained_own) == ({"trained": 3}, 3)


def test_a_commit_waits_for_the_disk(buffer):
    full = 2  # by SQLite's documentation
    assert buffer._db.execute("PRAGMA synchronous").fetchone()[0] == full
    assert buffer._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_a_group_is_found_by_a_prefix_of_its_id(buffer, reader):
    fill(buffer, own=1)
    (summary,) = reader.list_groups(limit=5)
    found = reader.find(summary.id[:8])
    assert found[0] == summary
    assert reader.find("zz") is None
    assert reader.find("%%%%") is None
    assert reader.envelopes([bytes.fromhex(summary.id), bytes(32)]) == [found[1]]


def test_a_file_that_is_no_database_is_refused_and_not_changed(tmp_path):
    path = tmp_path / "replay.sqlite"
    path.write_bytes(b"this is no database, but may be useful" * 100)
    before = path.read_bytes()
    with pytest.raises(DamagedError, match="the next start of the node replaces it"):
        ReplayBuffer(path)
    assert path.read_bytes() == before


def test_another_schema_is_refused(path, buffer):
    buffer.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="another version of ftis-node .schema 99, this one reads 1.: use that"):
        ReplayBuffer(path)


def test_rollouts_are_read_while_the_buffer_is_open(tmp_path, identity):
    with pytest.raises(ConfigError, match="no replay buffer"):
        ftis_node.ReplayBuffer.open(tmp_path)
    buffer = ReplayBuffer(Home(tmp_path).replay)
    assert buffer.admit(accept(make_group(identity), identity), own=False)
    rollouts = ftis_node.ReplayBuffer.open(str(tmp_path))
    frame, dataset = rollouts.to_pandas(), rollouts.to_dataset()
    buffer.close()
    assert list(frame["reward"]) == dataset["reward"][:] == [1.0, 0.0]
    assert dataset["token_ids"][0] == [10, 11, 2]


def test_an_envelope_is_decoded_only_with_a_valid_signature(identity):
    group = make_group(identity)
    data = seal_group(group, identity).to_bytes()
    assert ftis_node.decode_envelope(data).rewards == group.rewards
    with pytest.raises(RecordError) as caught:
        ftis_node.decode_envelope(data[:-1] + bytes([data[-1] ^ 1]))
    assert caught.value.reason == "signature"
    for invalid in (b"", b"\xff" * 40, data[:-1], bytes(5 << 20)):
        with pytest.raises(RecordError):
            ftis_node.decode_envelope(invalid)


def test_a_run_without_a_task_is_given_as_the_reason(tmp_path):
    """An exception here would end the dashboard."""
    home = Home(tmp_path)
    home.run_toml.write_text('name = "no task"\n')
    group: Any = SimpleNamespace(prompt_ref=PromptRef("arithmetic", "train", 1))
    assert PromptResolver(home).resolve(group).missing == "the home's run.toml names no task"
