"""The peer manager: validation results change the trust_level of peers, and the trust_level survives a restart."""

import json
import math
import sqlite3
import subprocess
import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ftis_node.config.limits import AccessSection
from ftis_node.errors import ConfigError
from ftis_node.node.peers.peer_manager import PeerManager
from ftis_node.node.peers.reputation_store import SCHEMA, SCHEMA_VERSION, ReputationStore
from ftis_node.records.group import SamplingSettings
from ftis_node.records.identity import Identity
from ftis_node.swarm import rate_limits
from ftis_node.swarm.reputation import Behaviour, ReputationTable
from ftis_node.telemetry.events import EventLog, read_events
from ftis_node.validation import Accepted, Refusal, Refused
from tests.conftest import accept, make_completion, make_group

ME, ANN, BOB, CAROL = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2, 3, 4))


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def open_manager(tmp_path):
    """Return a function that opens the file of the peers; `access` are the settings of that section."""
    with ExitStack() as stack:
        events = stack.enter_context(closing(EventLog(tmp_path / "events.jsonl")))

        def opened(clock: Clock | None = None, **access: object) -> PeerManager:
            settings = AccessSection.model_validate(access)
            path, clock = tmp_path / "peers.sqlite", clock or Clock()
            manager = PeerManager(path, own_id=ME.peer_id, settings=settings, events=events, clock=clock)
            stack.callback(manager._store.close)
            return manager

        yield opened


def accepted(identity: Identity, *, long: bool = False) -> Accepted:
    completions = (make_completion(*range(40), reward=1.0), make_completion(*range(50, 90)))
    return accept(make_group(identity, **({"completions": completions} if long else {})), identity)


def reason_for(manager: PeerManager, group: Accepted) -> str | None:
    return manager.copies.duplicate_reason(group.group, group.envelope.id)


def refused(reason: str, *, signed: bool = True) -> Refused:
    return Refused(Refusal(reason, "because"), ANN.peer_id, b"id", signed=signed, num_tokens=5)


def test_a_peer_with_false_claims_is_banned_and_then_on_probation(tmp_path, open_manager):
    clock = Clock()
    manager = open_manager(clock)
    for _ in range(3):
        assert not manager.is_banned(ANN.peer_id)
        manager.settle(refused("reward_mismatch"), origin=BOB.peer_id)
    assert manager.is_banned(ANN.peer_id)
    assert not manager.is_banned(BOB.peer_id), "the peer that passed the group on cannot know its rewards"
    row, until = manager.row(ANN.peer_id), clock.now + 300.0
    assert (row["trust_level"], row["banned_until"], row["reasons"]) == ("banned", until, {"reward_mismatch": 3})
    banned = read_events(tmp_path / "events.jsonl", name="reputation_changed")[-1]
    assert (banned["peer"], banned["trust_level"], banned["why"]) == (ANN.peer_id, "banned", "reward_mismatch: because")
    clock.now += 300.0
    assert not manager.is_banned(ANN.peer_id)
    assert manager.row(ANN.peer_id)["trust_level"] == "probation"


def test_the_named_sender_of_a_forged_group_is_not_charged(open_manager, monkeypatch):
    monkeypatch.setattr(rate_limits, "GROUPS_PER_MINUTE", 2)
    manager = open_manager()
    for _ in range(3):
        manager.settle(refused("signature", signed=False), origin=BOB.peer_id)
    assert manager.is_banned(BOB.peer_id)
    assert ANN.peer_id not in manager.known()
    assert manager.within_quota(ANN.peer_id)


def test_accepted_groups_use_up_the_quota(open_manager, monkeypatch):
    monkeypatch.setattr(rate_limits, "GROUPS_PER_MINUTE", 3)
    manager = open_manager()
    for _ in range(3):
        assert manager.within_quota(ANN.peer_id)
        manager.settle(accepted(ANN), origin=BOB.peer_id)
    assert not manager.within_quota(ANN.peer_id)
    assert manager.within_quota(ME.peer_id)
    manager.trust(ANN.peer_id)
    assert manager.within_quota(ANN.peer_id)


def test_the_search_for_copies_uses_up_the_time_for_scoring(open_manager, monkeypatch):
    for name in ("SCORING_S_PER_MINUTE", "NEW_PEERS_SCORING_S_PER_MINUTE"):
        monkeypatch.setattr(rate_limits, name, 1e-9)
    for use in (reason_for, PeerManager.remember):
        manager = open_manager()
        assert manager.may_score(ANN.peer_id)
        use(manager, accepted(ANN, long=True))
        assert not manager.may_score(ANN.peer_id)


def test_the_first_relay_of_an_unconnected_sender_does_not_decide_its_share_for_good(open_manager):
    manager, neighbors = open_manager(), []
    for relay, address in ((BOB, ""), (BOB, "/ip4/8.8.8.8/tcp/1"), (CAROL, ""), (CAROL, ""), (BOB, "")):
        if address:  # it is known only later
            manager.note_addresses(BOB.peer_id, [address])
            manager.trust(BOB.peer_id)
        manager.settle(accepted(ANN), origin=relay.peer_id)
        neighbors.append(manager.share_cap().neighbor(ANN.peer_id))
        manager.trust(CAROL.peer_id, len(neighbors) == 3)
    assert neighbors == [BOB.peer_id] * 3 + [ANN.peer_id] * 2, "another new peer may be the same one"


@pytest.mark.parametrize(("limit", "score"), [("NEW_PEERS_GROUPS_PER_MINUTE", 0.0), ("GROUPS_PER_MINUTE", -0.25)])
def test_a_new_peer_is_charged_for_its_own_rate_and_not_for_that_of_all_new_peers(
    open_manager, monkeypatch, limit, score
):
    monkeypatch.setattr(rate_limits, limit, 1)
    manager = open_manager()
    spender = BOB if limit.startswith("NEW") else ANN
    manager.settle(replace(refused("stale"), sender=spender.peer_id), origin=spender.peer_id)
    assert not manager.within_quota(ANN.peer_id)
    manager.settle(refused("quota"), origin=ANN.peer_id)
    assert manager.row(ANN.peer_id)["score"] == score


def test_a_copy_of_an_own_group_is_recognized(open_manager):
    manager = open_manager()
    manager.remember(accepted(ME, long=True))
    assert reason_for(manager, accepted(ANN, long=True)) == "duplicate_of_own"
    assert reason_for(manager, accepted(ME, long=True)) is None
    manager.remember(accepted(ME))
    assert reason_for(manager, accepted(ANN)) is None, "short completions may be equal by chance"


@pytest.mark.parametrize(
    ("sampling", "probability", "reason"),
    [
        (SamplingSettings(), 0.95, "duplicate_of_own"),
        (SamplingSettings(top_p=0.9), 0.95, None),  # top_p leaves this token alone, so it is certain
        (SamplingSettings(top_p=0.9), 0.8, "duplicate_of_own"),
        (SamplingSettings(top_k=1), 0.5, None),
    ],
)
def test_equal_completions_that_truncated_sampling_makes_are_no_copies(open_manager, sampling, probability, reason):
    def sampled(identity: Identity) -> Accepted:
        one = replace(make_completion(*range(500)), logprobs=np.full(500, math.log(probability), dtype=np.float32))
        group = make_group(identity, completions=(replace(one, reward=1.0), one), sampling=sampling)
        return accept(group, identity)

    manager = open_manager()
    manager.remember(sampled(ME))
    assert reason_for(manager, sampled(ANN)) == reason


def test_bans_trust_and_scores_survive_a_kill(tmp_path, open_manager):
    code = f"""
import os, signal
from pathlib import Path
from ftis_node.config.limits import AccessSection
from ftis_node.node.peers.peer_manager import PeerManager
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
    manager = open_manager()
    assert manager.is_banned(ANN.peer_id)
    assert manager.row(ANN.peer_id)["reasons"] == {"logprob_mismatch": 3}
    assert manager.is_trusted(BOB.peer_id)


def test_an_allow_list_bans_all_other_peers(open_manager):
    manager = open_manager(allow=[ANN.peer_id])
    assert not manager.is_banned(ANN.peer_id)
    assert manager.is_banned(BOB.peer_id)
    assert not manager.is_banned(ME.peer_id)


def test_thousands_of_identities_fill_neither_memory_nor_disk(tmp_path, open_manager):
    clock = Clock()
    manager = open_manager(clock)
    for _ in range(30):
        manager.note(ANN.peer_id, Behaviour.CONTRIBUTED)
    manager.ban(BOB.peer_id, 60.0)
    for number in range(6000):
        clock.now += 0.001
        manager.note(f"peer{number}", Behaviour.REFUSED)
    rows = {peer_id: manager.row(peer_id) for peer_id in manager.known()}
    assert len(rows) <= 4096
    assert rows[ANN.peer_id]["score"] == pytest.approx(3.0)
    assert rows[BOB.peer_id]["trust_level"] == "banned"
    manager.close()
    assert (tmp_path / "peers.sqlite").stat().st_size < 2 << 20
    again = open_manager(clock)
    assert {peer_id: again.row(peer_id) for peer_id in again.known()} == rows


NOW = 1e9


@pytest.fixture
def path(tmp_path):
    """Write a file with a banned peer."""
    reasons = json.dumps({"false_claim": 1, "reward_mismatch": 3, "quota": 2})
    with closing(sqlite3.connect(path := tmp_path / "peers.sqlite")) as db:
        db.executescript(f"{SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};")
        banned = (NOW, NOW + 60, reasons, NOW)
        db.execute("INSERT INTO peers VALUES ('ann', -5, ?, ?, 'reward_mismatch', 2, 0, ?, ?)", banned)
        db.execute("INSERT INTO peers VALUES ('bob', 3, ?, 0, '', 0, 1, 'not JSON', ?)", (NOW, NOW))
        db.commit()
    return path


def loaded(path: Path) -> ReputationTable:
    table = ReputationTable()
    with closing(ReputationStore(path)) as store:
        store.load(table, now=NOW)
    return table


def test_a_row_with_a_damaged_text_is_loaded(path):
    table = loaded(path)
    ann, bob = table.record_of("ann"), table.record_of("bob")
    assert ann.reasons == {"false_claim": 1, "reward_mismatch": 3, "quota": 2}
    assert (ann.reputation.ban_reason, ann.reputation.num_bans) == ("reward_mismatch", 2)
    assert (ann.reputation.score, ann.reputation.banned_until) == (-5, NOW + 60)
    assert bob.reputation.trusted and not bob.reasons


def test_another_schema_is_refused_but_not_that_of_the_buffer(path, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr("ftis_node.replay.database.SCHEMA_VERSION", SCHEMA_VERSION + 1)
        assert loaded(path).record_of("ann").reputation.num_bans == 2
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(ConfigError, match=f"schema {SCHEMA_VERSION + 1}"):
        ReputationStore(path)


def test_a_sender_earns_credit_once_for_a_problem(open_manager):
    catalog, first = open_manager().copies, accepted(ANN, long=True).group
    credits = []
    for number, problem in enumerate((b"one", b"one", b"two"), start=1):
        completions = (make_completion(*range(100 * number, 100 * number + 40), reward=1.0), make_completion(5, 6))
        group = replace(first.with_completions(completions), number=number, problem_hash=problem * 4)
        catalog.remember(one := accept(group, ANN))
        credits.append(catalog.credit_of(one.envelope.id))
    assert credits[0] > 0 and credits[1] == 0 and credits[2] > 0
