"""The peer manager: validation results change the standing of peers, and the standing survives a restart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ftis_node.config.limits import AccessSection
from ftis_node.node.peers.manager import PeerManager
from ftis_node.records.envelope import seal_group
from ftis_node.records.group import PromptRef
from ftis_node.records.identity import Identity
from ftis_node.replay.rows import StoredGroup
from ftis_node.swarm import rate_limits
from ftis_node.swarm.reputation import Behaviour
from ftis_node.telemetry.events import EventLog, read_events
from ftis_node.validation import Accepted, Refusal, Refused
from tests.conftest import make_completion, make_group, problem_hash

ME, ANN, BOB, CAROL = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2, 3, 4))


class Clock:
    """A manual Unix clock."""

    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def events(tmp_path: Path) -> Iterator[EventLog]:
    events = EventLog(tmp_path / "events.jsonl")
    yield events
    events.close()


def open_manager(tmp_path: Path, events: EventLog, clock: Clock | None = None, **access: object) -> PeerManager:
    settings = AccessSection.model_validate(access)
    return PeerManager(
        tmp_path / "peers.sqlite", own_id=ME.peer_id, settings=settings, events=events, clock=clock or Clock()
    )


def accepted(identity: Identity, *, long: bool = False, first_id: int = 0) -> Accepted:
    first, second = range(first_id, first_id + 40), range(first_id + 50, first_id + 90)
    completions = (make_completion(*first, reward=1.0), make_completion(*second))
    group = make_group(identity, **({"completions": completions} if long else {}))
    envelope = seal_group(group, identity)
    return Accepted(envelope, envelope.to_bytes(), group, (1,))


def reason_for(manager: PeerManager, group: Accepted) -> str | None:
    return manager.copies.duplicate_reason(group.group, group.envelope.id)


def refused(reason: str, *, signed: bool = True) -> Refused:
    return Refused(Refusal(reason, "because"), ANN.peer_id, b"id", signed=signed, num_tokens=5)


def test_a_peer_with_false_claims_is_banned_and_then_on_probation(tmp_path: Path, events: EventLog) -> None:
    clock = Clock()
    manager = open_manager(tmp_path, events, clock)
    for _ in range(3):
        assert not manager.is_banned(ANN.peer_id)
        manager.settle(refused("reward_mismatch"), origin=BOB.peer_id)
    assert manager.is_banned(ANN.peer_id)
    assert not manager.is_banned(BOB.peer_id), "the peer that passed the group on cannot know its rewards"
    row = manager.row(ANN.peer_id)
    assert (row["standing"], row["banned_until"], row["reasons"]) == (
        "banned",
        clock.now + 300.0,
        {"reward_mismatch": 3},
    )
    banned = read_events(tmp_path / "events.jsonl", name="reputation_changed")[-1]
    assert (banned["peer"], banned["standing"], banned["why"]) == (ANN.peer_id, "banned", "reward_mismatch: because")
    clock.now += 300.0
    assert not manager.is_banned(ANN.peer_id)
    assert manager.row(ANN.peer_id)["standing"] == "probation"
    manager.close()


def test_the_named_sender_of_a_forged_group_is_not_charged(
    tmp_path: Path, events: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limits, "GROUPS_PER_MINUTE", 2)
    manager = open_manager(tmp_path, events)
    for _ in range(3):
        manager.settle(refused("signature", signed=False), origin=BOB.peer_id)
    assert manager.is_banned(BOB.peer_id)
    assert ANN.peer_id not in manager.known()
    assert manager.within_quota(ANN.peer_id)
    manager.close()


def test_accepted_groups_use_up_the_quota(tmp_path: Path, events: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "GROUPS_PER_MINUTE", 3)
    manager = open_manager(tmp_path, events)
    for _ in range(3):
        assert manager.within_quota(ANN.peer_id)
        manager.settle(accepted(ANN), origin=BOB.peer_id)
    assert not manager.within_quota(ANN.peer_id)
    assert manager.within_quota(ME.peer_id)
    manager.trust(ANN.peer_id)
    assert manager.within_quota(ANN.peer_id)
    manager.close()


@pytest.mark.parametrize(
    ("reason", "is_charged"), [("quota", False), ("scoring_quota", False), ("reward_mismatch", True)]
)
def test_a_group_beyond_the_quota_is_not_charged_to_the_quota(
    tmp_path: Path, events: EventLog, monkeypatch: pytest.MonkeyPatch, reason: str, is_charged: bool
) -> None:
    monkeypatch.setattr(rate_limits, "GROUPS_PER_MINUTE", 2)
    manager = open_manager(tmp_path, events)
    for _ in range(2):
        manager.settle(refused(reason), origin=ANN.peer_id)
    assert manager.within_quota(ANN.peer_id) is not is_charged
    manager.close()


def test_a_copy_of_an_own_group_is_recognized(tmp_path: Path, events: EventLog) -> None:
    manager = open_manager(tmp_path, events)
    manager.remember(accepted(ME, long=True))
    assert reason_for(manager, accepted(ANN, long=True)) == "duplicate_of_own"
    assert reason_for(manager, accepted(ME, long=True)) is None
    manager.remember(accepted(ME))
    assert reason_for(manager, accepted(ANN)) is None, "short completions may be equal by chance"
    manager.close()


def test_a_copy_of_a_known_peers_group_long_after_it_is_charged_to_a_new_peer(tmp_path: Path, events: EventLog) -> None:
    clock = Clock()
    manager = open_manager(tmp_path, events, clock)
    for _ in range(12):
        manager.note(ANN.peer_id, Behaviour.CONTRIBUTED)
    first, late = accepted(ANN, long=True), accepted(BOB, long=True)
    manager.copies.note_announced(first.envelope.id, announcer=ANN.peer_id)
    manager.remember(first)
    clock.now += 61.0
    manager.copies.note_announced(late.envelope.id, announcer=BOB.peer_id)
    manager.copies.note_announced(late.envelope.id, announcer=BOB.peer_id)
    assert reason_for(manager, late) == "duplicate_completions"
    manager.close()


def test_the_group_announced_first_replaces_its_copy_and_takes_its_credit(tmp_path: Path, events: EventLog) -> None:
    """A thief with a fast link delivers the copy first. No peer is charged, because a slow link looks the same."""
    clock = Clock()
    manager = open_manager(tmp_path, events, clock)
    original, stolen = accepted(ANN, long=True), accepted(BOB, long=True)
    for one in (original, stolen):
        manager.copies.note_announced(one.envelope.id, announcer=one.group.sender)
        clock.now += 0.1
    assert manager.remember(stolen) is None
    manager.settle(stolen, origin=BOB.peer_id)
    assert manager.row(BOB.peer_id)["score"] == 0.02
    assert reason_for(manager, original) is None
    assert manager.remember(original) == stolen.envelope.id
    manager.settle(original, origin=ANN.peer_id)
    manager.note_used(StoredGroup.from_accepted(stolen, own=False))  # by a step that had taken it
    assert (manager.row(ANN.peer_id)["score"], manager.row(BOB.peer_id)["score"]) == (0.02, 0.0)
    assert reason_for(manager, accepted(CAROL, long=True)) == "duplicate_undecided", "a copy of the original"
    manager.close()


def test_only_new_problems_with_a_signal_and_surprise_earn_credit(tmp_path: Path, events: EventLog) -> None:
    manager = open_manager(tmp_path, events)

    def score_after(group: Accepted) -> float:
        manager.remember(group)
        manager.settle(group, origin=ANN.peer_id)
        manager.note_used(StoredGroup.from_accepted(group, own=False))
        return float(manager.row(ANN.peer_id)["score"])

    def about(index: int, **changes: object) -> Accepted:
        made = accepted(ANN, long=True, first_id=1000 * index).group
        ref = PromptRef("arithmetic", "train", index)
        group = replace(made, prompt_ref=ref, problem_hash=problem_hash(index), **changes)
        envelope = seal_group(group, ANN)
        return Accepted(envelope, envelope.to_bytes(), group, (1,))

    assert score_after(about(9, rewards=(0.0, 0.0))) == 0.0, "no signal"
    assert score_after(about(1)) == 0.12
    assert score_after(about(1, number=99)) == 0.12, "the same problem"
    assert score_after(about(2)) == 0.24
    assert score_after(accepted(ANN)) == pytest.approx(0.24 + 0.12 * 5.25 / 20, abs=0.01), "five tokens"
    assert score_after(about(5)) == pytest.approx(0.27, abs=0.01), "its problem has had credit"
    manager.close()


def test_other_indices_of_one_text_earn_credit_once_and_hide_no_copy(tmp_path: Path, events: EventLog) -> None:
    manager = open_manager(tmp_path, events)

    def of(identity: Identity, index: int, **changes: object) -> Accepted:
        ref = PromptRef("arithmetic", "train", index)
        group = replace(accepted(identity, long=True).group, prompt_ref=ref, problem_hash=problem_hash(index))
        group = group.with_completions([replace(one, **changes) for one in group.completions])
        envelope = seal_group(group, identity)
        return Accepted(envelope, envelope.to_bytes(), group, (1,))

    first = of(ANN, 69)
    manager.remember(first)
    manager.settle(first, origin=ANN.peer_id)
    assert manager.row(ANN.peer_id)["score"] == 0.02
    assert reason_for(manager, of(BOB, 382)) == "duplicate_undecided"
    other = of(ANN, 691, token_ids=np.arange(1000, 1040, dtype=np.int32))
    manager.remember(other)
    manager.settle(other, origin=ANN.peer_id)
    assert manager.row(ANN.peer_id)["score"] == 0.02
    manager.close()


def test_bans_trust_and_scores_survive_a_kill(tmp_path: Path, events: EventLog) -> None:
    code = f"""
import os, signal
from pathlib import Path
from ftis_node.config.limits import AccessSection
from ftis_node.node.peers.manager import PeerManager
from ftis_node.swarm import rate_limits
from ftis_node.swarm.reputation import Behaviour
from ftis_node.telemetry.events import EventLog
manager = PeerManager(Path({str(tmp_path / "peers.sqlite")!r}), own_id="me", settings=AccessSection(),
                events=EventLog(Path({str(tmp_path / "other.jsonl")!r})), clock=lambda: 1e9)
manager.trust({BOB.peer_id!r})
for _ in range(3):
    manager.note({ANN.peer_id!r}, Behaviour.FALSE_CLAIM, reason="logprob_mismatch")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    manager = open_manager(tmp_path, events)
    assert manager.is_banned(ANN.peer_id)
    assert manager.row(ANN.peer_id)["reasons"] == {"logprob_mismatch": 3}
    assert manager.is_trusted(BOB.peer_id)
    manager.close()


def test_an_allow_list_bans_all_other_peers(tmp_path: Path, events: EventLog) -> None:
    manager = open_manager(tmp_path, events, allow=[ANN.peer_id])
    assert not manager.is_banned(ANN.peer_id)
    assert manager.is_banned(BOB.peer_id)
    assert not manager.is_banned(ME.peer_id)
    manager.close()


def test_ten_thousand_identities_fill_neither_memory_nor_disk(tmp_path: Path, events: EventLog) -> None:
    clock = Clock()
    manager = open_manager(tmp_path, events, clock)
    for _ in range(30):
        manager.note(ANN.peer_id, Behaviour.CONTRIBUTED)
    manager.ban(BOB.peer_id, 60.0)
    for number in range(10000):
        clock.now += 0.001
        manager.note(f"peer{number}", Behaviour.REFUSED)
    rows = {peer_id: manager.row(peer_id) for peer_id in manager.known()}
    assert len(rows) <= 4096
    assert rows[ANN.peer_id]["score"] == pytest.approx(3.0)
    assert rows[BOB.peer_id]["standing"] == "banned"
    manager.close()
    assert (tmp_path / "peers.sqlite").stat().st_size < 2 << 20
    again = open_manager(tmp_path, events, clock)
    assert {peer_id: again.row(peer_id) for peer_id in again.known()} == rows
    again.close()
