"""Names that peers choose: empty looks and equal looks."""

from dataclasses import replace

import pytest

from ftis_node.errors import UsageError
from ftis_node.records.envelope import PeerRecord, open_peer_record, seal_peer_record
from ftis_node.records.identity import Identity
from ftis_node.records.names import folded_name, visible_name
from ftis_node.swarm.overview import RunSummary, SwarmRow, make_view
from ftis_node.swarm.peer_rows import find_peer, shown_names
from ftis_node.view.swarm import swarm_text
from tests.records.test_bounds import RECORD

ME, THIEF = Identity.from_seed(b"1" * 32), Identity.from_seed(b"2" * 32)


def opened(name: str) -> PeerRecord:
    return open_peer_record(seal_peer_record(replace(RECORD, name=name, peer_id=ME.peer_id), ME))


@pytest.mark.parametrize("name", ["\u3164", "\u200b\u200d", "\U000e0041", "\u0301", " \t"])
def test_a_blank_name_is_no_name(name):
    assert opened(name).name == ""


def test_invisible_characters_are_removed_and_visible_ones_stay():
    assert opened("vic\u200btim\u3164").name == "victim"
    for name in ("Zoë 2", "京", "\u05d0\u05d1", "a_b-c.d", "\x1b[2J"):
        assert opened(name).name == visible_name(name) == name


def test_names_that_differ_by_case_width_style_or_spaces_look_alike():
    names = ("victim", "VICTIM", "\uff56ictim", "\U0001d42fictim", " vic tim", "victim\u3164")
    assert {folded_name(name) for name in names} == {"victim"}
    assert folded_name("victim2") == "victim2"


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("ann", "\u0430nn"),  # Cyrillic
        ("ann", "\u00e1n\u0336n"),
        ("ann", "-a_n n!"),
        ("node1", "nodel"),
        ("e\U0001d159va", "eva"),
    ],
)
def test_names_that_differ_by_letters_that_look_alike_marks_or_punctuation_are_shown_with_ids(name, other):
    shown = shown_names({ME.peer_id: name, THIEF.peer_id: other, "third": "bob"}, width=20)
    assert shown[ME.peer_id].endswith(ME.peer_id[-4:])
    assert shown[THIEF.peer_id].endswith(THIEF.peer_id[-4:])
    assert shown["third"] == "bob"
    with pytest.raises(UsageError, match="fits 2 peers"):
        find_peer("ann", [{"peer_id": one.peer_id, "name": "ann" + end} for one, end in ((ME, ""), (THIEF, "."))])


def test_names_of_other_scripts_or_of_symbols_remain_different():
    names = ["\u4eac", "\u90fd", "\u05d0", "\u05d1", "!!", "??", "ann2", "ann3", "\u0436\u0443\u043a"]
    assert len({folded_name(name) for name in names}) == len(names)


def test_peers_whose_names_look_alike_are_shown_with_the_ends_of_their_ids():
    rows = {ME.peer_id: "a long name of mine", THIEF.peer_id: "A LONG NAME OF MINE", "other": "bob", "blank": ""}
    shown = shown_names(rows, width=16)
    assert shown["other"] == "bob" and shown["blank"] == ""
    for identity in (ME, THIEF):
        assert shown[identity.peer_id].endswith(f" {identity.peer_id[-4:]}")
        assert len(shown[identity.peer_id]) == 16
    assert shown_names({"other": "a long name of mine"}, width=9) == {"other": "a long n\u2026"}


def test_the_table_distinguishes_an_unknown_peer_with_the_nodes_own_name():
    def row(identity, name):
        return SwarmRow(identity.peer_id, name, "full", "m", 1, "1", 1.0, 1.0, learns_from={THIEF.peer_id: 1.0})

    view = make_view([row(ME, "ann"), row(THIEF, "Ann")], run=RunSummary("ab"), now=2.0, own_id=ME.peer_id)
    text = "\n".join(swarm_text([view], now=2.0))
    assert f"\nann {ME.peer_id[-4:]} " in text and f"\nAnn {THIEF.peer_id[-4:]} " in text
    assert f"Ann {THIEF.peer_id[-4:]} 100%" in text
