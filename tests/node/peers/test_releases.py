"""Releases of the packages that grade: nobody is charged for a difference, and both nodes log it."""

from contextlib import closing
from dataclasses import replace

import pytest

from ftis_node import __version__
from ftis_node.config.limits import AccessSection
from ftis_node.node.context import NodeDescription
from ftis_node.node.peers.own_record import own_releases, release_differences
from ftis_node.node.peers.peer_manager import PeerManager
from ftis_node.node.peers.peer_registry import PeerRegistry
from ftis_node.node.peers.version_advice import newer_release
from ftis_node.records.envelope import PeerRecord, open_peer_record, seal_peer_record
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import Releases
from ftis_node.tasks import load_task
from ftis_node.telemetry.events import EventLog
from ftis_node.validation import Refusal, Refused
from tests.conftest import RUN_ID, TOKENIZER

ME, PEER = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2))
OURS = Releases("ftis-node 0.1, math-verify 0.9.0", "5.19.0", "ab" * 16)
ABOUT = NodeDescription(name="me", model="org/model", tokenizer=TOKENIZER, releases=OURS)


def _record(releases: Releases = OURS, **changes: object) -> PeerRecord:
    record = PeerRecord(
        run_id=RUN_ID,
        peer_id=PEER.peer_id,
        name="ann",
        model="org/model",
        parameters=1,
        tokenizer=TOKENIZER,
        role="full",
        last_number=0,
        policy_version=0,
        tokens_per_s=1.0,
        created_at=1.0,
        software="0.1",
        releases=releases,
    )
    return replace(record, **changes)


@pytest.mark.parametrize("reason", ["reward_mismatch", "prompt_mismatch"])
@pytest.mark.parametrize(
    ("record", "is_charged"),
    [
        (_record(), True), (_record(replace(OURS, template="cd" * 16)), True),
        (_record(replace(OURS, transformers="5.10.0")), False),
        (_record(replace(OURS, grader="ftis-node 0.1, math-verify 0.8.0")), False), (_record(Releases()), False),
        (None, False),
    ],
)  # fmt: skip
def test_a_reward_or_problem_that_differs_costs_only_a_peer_with_the_same_releases(
    tmp_path, reason, record, is_charged
):
    with closing(EventLog(tmp_path / "events.jsonl")) as events:
        manager = PeerManager(
            tmp_path / "peers.sqlite", own_id=ME.peer_id, settings=AccessSection(), events=events, releases=OURS
        )
        if record is not None:
            manager.registry.seen(PEER.peer_id).record = record
        for refusal in [Refusal(reason, "it differs")] * 3:
            manager.settle(Refused(refusal, PEER.peer_id, b"id", signed=True), origin=PEER.peer_id)
        assert (manager.row(PEER.peer_id)["score"] < 0) == is_charged
        manager.settle(Refused(Refusal("finish_reason", "x"), PEER.peer_id, b"id", signed=True), origin=PEER.peer_id)
        assert manager.row(PEER.peer_id)["score"] < 0, "other reasons do not depend on releases"
        manager.close()


def test_a_difference_of_releases_is_one_clause_that_names_both():
    assert list(release_differences(_record(), ABOUT)) == []
    assert list(release_differences(_record(Releases()), ABOUT)) == [], "a peer without releases has no difference"
    (clause,) = release_differences(_record(replace(OURS, grader="math-verify 0.8.0\x1b[2J")), ABOUT)
    assert clause == (
        "grades with math-verify 0.8.0\\x1b[2J, this node with ftis-node 0.1, math-verify 0.9.0: groups whose rewards "
        "differ are refused without a charge; install the same releases"
    )


def test_a_node_names_its_own_releases():
    class Tokenizer:
        template_digest = "ab" * 16

    class Graded:
        name, grader = "graded", "math-verify 0.9.0"

    arithmetic = own_releases(load_task("arithmetic"), Tokenizer())  # type: ignore[arg-type]
    assert arithmetic.grader == f"ftis-node {__version__}"
    assert arithmetic.transformers.split(".")[0] == "5"
    graded = own_releases(Graded(), Tokenizer())  # type: ignore[arg-type]
    assert graded.grader == f"ftis-node {__version__}, math-verify 0.9.0"
    assert open_peer_record(seal_peer_record(_record(graded), PEER)).releases == graded


@pytest.mark.parametrize(
    ("versions", "clause"),
    [
        (["99.0", "0.3.0", "0.2.0", "0.1.0"], "3 of 4 members run 0.2.0 or newer, this node 0.1.0: update ftis-node"),
        (["99.0", "0.1.0"], ""),
        (["0.2.0", None], ""),
        (["0.2.0", "newest \x1b[2J"], ""),
        ([], ""),
    ],
)
def test_a_newer_release_is_named_if_most_members_run_it(versions, clause):
    assert newer_release(versions, ours="0.1.0") == clause


def test_the_records_of_the_connected_members_count():
    registry = PeerRegistry()
    registry.seen(PEER.peer_id).record = _record(software="999.0")
    assert registry.newer_release([PEER.peer_id]).startswith("1 of 1 members run 999.0")
    assert registry.newer_release([ME.peer_id]) == ""
