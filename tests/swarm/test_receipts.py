"""Receipts: which are counted, which are refused and why, and the rank of a swarm by them."""

from __future__ import annotations

import random
from contextlib import closing

import pytest
from msgspec.structs import replace

from ftis_node.config.limits import AccessSection
from ftis_node.errors import RecordError
from ftis_node.node.peers.peer_manager import PeerManager
from ftis_node.node.peers.peer_registry import PeerActivity
from ftis_node.records.bounds import MAX_RECEIPTS
from ftis_node.records.envelope import PeerRecord, open_peer_record, seal_peer_record
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import PeerStats, Receipt, receipt_key
from ftis_node.swarm.overview import RunSummary, make_view, swarm_row
from ftis_node.swarm.receipts import DAY_S, INFLATED, OF_ITSELF, ReceiptBook, StepLimits, Used, totals_by_key
from ftis_node.telemetry.events import EventLog
from ftis_node.telemetry.health_summary import used_by_peers

ME, PEER, OTHER = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
LIMITS = StepLimits(groups=8, tokens=1000)
NOW = 20_000 * DAY_S + 3600.0


def record_of(signer: Identity, receipts: tuple[Receipt, ...], *, step: int = 10) -> PeerRecord:
    stats = PeerStats(step=step, receipts=receipts)
    return PeerRecord("0" * 32, signer.peer_id, "", "", 0, "0" * 32, "full", 0, 0, 0.0, NOW, "", stats=stats)


def for_me(groups: int, tokens: int) -> Receipt:
    return Receipt(receipt_key(ME.peer_id), groups, tokens)


@pytest.fixture
def book() -> ReceiptBook:
    book = ReceiptBook(ME.peer_id, LIMITS)
    for _ in range(40):
        book.note_used(ME.peer_id, 500)
    return book


def note(book: ReceiptBook, signer: Identity, *receipts: Receipt, step: int = 10, now: float = NOW) -> str:
    """Send a signed record through its bytes and return the reason of a refusal."""
    data = seal_peer_record(record_of(signer, receipts, step=step), signer)
    return book.note_record(open_peer_record(data), now=now)


def test_receipts_of_all_signers_are_added_up(book) -> None:
    assert note(book, PEER, for_me(4, 2000)) == ""
    assert note(book, OTHER, for_me(7, 3500), Receipt(receipt_key(PEER.peer_id), 3, 900)) == ""
    figures = book.figures(now=NOW)
    assert (figures.peers, figures.groups, figures.tokens) == (2, 11, 5500)
    expected = "2 peers trained on 11 of this node's groups since yesterday, 2 peers on 11 in all"
    assert used_by_peers(figures) == expected


@pytest.mark.parametrize(
    ("receipts", "step", "reason"),
    [
        pytest.param([for_me(81, 2000)], 10, INFLATED, id="more groups than its steps can use"),
        pytest.param([for_me(40, 900), Receipt(bytes(8), 41, 900)], 10, INFLATED, id="so in all"),
        pytest.param([for_me(2, 2001)], 10, INFLATED, id="more tokens than its groups have"),
        pytest.param([for_me(1, 1)], 0, INFLATED, id="before its first step"),
        pytest.param([for_me(1, 1), Receipt(receipt_key(PEER.peer_id), 1, 1)], 10, OF_ITSELF, id="for itself"),
    ],
)
def test_an_impossible_receipt_is_refused_by_name(book, receipts, step, reason) -> None:
    assert (note(book, PEER, *receipts, step=step), book.figures(now=NOW).groups) == (reason, 0)


def test_a_signer_cannot_praise_a_node_for_more_groups_than_it_published(book) -> None:
    assert (note(book, PEER, for_me(70, 2000)), book.figures(now=NOW).groups) == ("", 40)


def test_a_forged_receipt_is_no_record(book) -> None:
    data = seal_peer_record(record_of(PEER, (for_me(4, 2000),)), OTHER)
    at = data.index(receipt_key(ME.peer_id))
    forged = data[: at + 9] + bytes([data[at + 9] ^ 1]) + data[at + 10 :]
    with pytest.raises(RecordError) as error:
        open_peer_record(forged)
    assert error.value.reason == "signature"
    # A record that names another signer is signed by the key of OTHER, so it counts as a receipt of OTHER.
    assert open_peer_record(data).peer_id == OTHER.peer_id


def test_a_replayed_receipt_counts_once(book) -> None:
    old = seal_peer_record(record_of(PEER, (for_me(4, 2000),)), PEER)
    new = seal_peer_record(record_of(PEER, (for_me(6, 3000),)), PEER)
    for data in (old, new, old, new, old):
        assert book.note_record(open_peer_record(data), now=NOW) == ""
    assert book.figures(now=NOW).groups == 6


def test_recent_groups_are_those_since_the_beginning_of_yesterday(book) -> None:
    for days_ago, groups in ((5, 2), (2, 3), (1, 7), (0, 12)):
        note(book, PEER, for_me(groups, 10 * groups), now=NOW - days_ago * DAY_S)
    figures = book.figures(now=NOW)
    assert (figures.groups, figures.recent_groups, figures.recent_peers) == (12, 9, 1)
    later = book.figures(now=NOW + 3 * DAY_S)
    assert (later.groups, later.recent_groups, later.recent_peers) == (12, 0, 0)
    note(book, PEER, for_me(13, 130), now=NOW + 3 * DAY_S)
    assert book.figures(now=NOW + 3 * DAY_S).recent_groups == 1


def test_a_record_has_all_receipts_in_turns(book) -> None:
    senders = [Identity.from_seed(bytes([9, number]) * 16).peer_id for number in range(MAX_RECEIPTS + 5)]
    for sender in senders:
        book.note_used(sender, 7)
    first, second = book.receipts(0), book.receipts(1)
    assert len(first) == len(second) == MAX_RECEIPTS
    assert {one.key for one in (*first, *second)} == set(map(receipt_key, senders)), "none for this node itself"
    assert open_peer_record(seal_peer_record(record_of(ME, first), ME)).stats.receipts == first


def manager(path, clock=lambda: NOW) -> PeerManager:
    events = EventLog(path.parent / "events.jsonl", max_bytes=1 << 20, kept_files=1)
    return PeerManager(path, own_id=ME.peer_id, settings=AccessSection(), events=events, clock=clock, limits=LIMITS)


def test_receipts_survive_a_restart(tmp_path) -> None:
    path = tmp_path / "peers.sqlite"
    with closing(manager(path)) as peers:
        peers.receipts.note_used(ME.peer_id, 500)
        peers.receipts.note_used(OTHER.peer_id, 20)
        note(peers.receipts, PEER, for_me(1, 500))
    with closing(manager(path)) as peers:
        assert peers.receipts.given[OTHER.peer_id] == Used(1, 20)
        assert peers.receipts.figures(now=NOW).groups == 1


def test_many_signers_of_little_displace_none_of_much(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("ftis_node.swarm.receipts.MAX_SIGNERS", 3)
    few, much = (
        [Identity.from_seed(bytes([number]) * 32) for number in numbers] for numbers in ((11, 12, 13), (14, 15))
    )
    with closing(manager(tmp_path / "peers.sqlite")) as peers:
        for signer in (*much, *few):
            note(peers.receipts, signer, for_me(9 if signer in much else 1, 500))
            peers.save()
    with closing(manager(tmp_path / "peers.sqlite")) as peers:
        assert set(peers.receipts.signers) == {one.peer_id for one in (*much, few[-1])}


def test_one_false_signer_does_not_decide_the_rank_and_counts_no_more_tokens_than_were_published(book) -> None:
    others = [Identity.from_seed(bytes([number]) * 32) for number in range(20, 24)]
    signed = [(one.peer_id, 100, (Receipt(receipt_key(PEER.peer_id), 100, 100),)) for one in others]
    false = Receipt(receipt_key(OTHER.peer_id), 1 << 60, 1 << 60)
    totals = totals_by_key([*signed, ("another", 1 << 61, (false,))], LIMITS)
    assert (totals[receipt_key(PEER.peer_id)], totals[false.key]) == (Used(400, 400), Used(2000, 2000))
    note(book, PEER, for_me(1 << 50, 1 << 59), step=1 << 60)
    figures = book.figures(now=NOW)
    assert (figures.groups, figures.tokens) == (40, 20_000)


def test_a_clock_that_was_ahead_hides_no_later_receipt(book) -> None:
    note(book, PEER, for_me(2, 20), now=NOW + 400 * DAY_S)
    note(book, PEER, for_me(9, 90))
    assert (book.figures(now=NOW).groups, book.figures(now=NOW).recent_groups) == (9, 9)


def test_the_claimed_steps_allow_all_receipts(book) -> None:
    for _ in range(20):
        book.note_used(OTHER.peer_id, 7)
    assert (book.least_steps(), ReceiptBook(ME.peer_id).least_steps()) == (3, 0)


def test_a_peer_that_begins_again_begins_its_receipts_again() -> None:
    activity = PeerActivity()
    for step, groups in ((10, 50), (11, 60), (1, 2)):
        activity.note_record(record_of(PEER, (for_me(groups, groups),), step=step))
    assert [one.groups for one in activity.receipts.values()] == [2]


def test_fifty_nodes_are_ranked_by_what_was_used() -> None:
    """Each node reads several records of each other one, because a record has not all receipts; three lie."""
    rng = random.Random(0)
    nodes = [Identity.from_seed(number.to_bytes(32, "big")) for number in range(50)]
    books = {node.peer_id: ReceiptBook(node.peer_id, LIMITS) for node in nodes}
    used = dict.fromkeys(books, 0)
    quality = {peer_id: rng.random() for peer_id in books}
    for book in books.values():
        for sender in rng.choices(list(books), weights=list(quality.values()), k=300):
            if sender != book.own_id:
                book.note_used(sender, 100)
                used[sender] += 1
    steps = {peer_id: sum(groups for groups, _ in book.given.values()) for peer_id, book in books.items()}
    liars = [node.peer_id for node in nodes[:3]]
    for liar in liars:  # its receipts do not count, so its senders lose them
        for sender, one in books[liar].given.items():
            used[sender] -= one.groups
    rows = []
    for node in nodes:
        activity = PeerActivity()
        for turn in range(5):
            receipts = books[node.peer_id].receipts(turn)
            if node.peer_id in liars:
                receipts = (Receipt(receipt_key(nodes[40].peer_id), 10**9, 10**9), *receipts[1:])
            record = record_of(node, receipts, step=steps[node.peer_id])
            activity.note_record(open_peer_record(seal_peer_record(record, node)))
        row = swarm_row(activity.record, seen_at=NOW)
        rows.append(replace(row, receipts=tuple(activity.receipts.values())))
    view = make_view(rows, run=RunSummary("0" * 32, limits=LIMITS), now=NOW)
    assert {row.peer_id: row.used_groups for row in view.peers} == used
    assert all(row.used_tokens == 100 * row.used_groups for row in view.peers)
    assert [row.used_groups for row in view.peers] == sorted(used.values(), reverse=True), "the rows are in this order"
